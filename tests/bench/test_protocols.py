"""Protocols deal every image where they say, the same for the same seed."""

import numpy as np
import pytest

from cafe_tta.bench import protocols
from cafe_tta.bench.protocols import Domain

NAMES = ("fog", "snow", "contrast")


def test_clean_is_every_image_once():
    (episode,) = protocols.clean(20, seed=1)
    assert sorted(episode.images) == list(range(20)) and episode.domains == (protocols.CLEAN,)
    assert list(episode.images) != list(range(20))


def test_separated_is_an_episode_for_each_corruption_and_severity():
    episodes = protocols.separated(20, NAMES, (3, 5))
    assert [episode.name for episode in episodes] == ["fog-3", "fog-5", "snow-3", "snow-5", "contrast-3", "contrast-5"]
    for episode in episodes:
        assert sorted(episode.images) == list(range(20)) and len(episode.domains) == 1


def test_severity_mixed_is_an_episode_for_each_corruption():
    episodes = protocols.severity_mixed(500, NAMES, (1, 2, 3, 4, 5))
    assert [episode.name for episode in episodes] == list(NAMES)
    assert episodes[1].domains == tuple(Domain("snow", severity) for severity in (1, 2, 3, 4, 5))
    assert np.bincount(episodes[1].domain_of).min() > 60  # about 100 each


def test_all_mixed_is_every_image_once_with_a_corruption_of_its_own():
    (episode,) = protocols.all_mixed(3000, NAMES, (5,))
    assert sorted(episode.images) == list(range(3000))
    assert np.abs(np.bincount(episode.domain_of) - 1000).max() < 120
    first = episode.domain_of[:300]
    assert len(set(first)) == 3  # mixed, not one after the other


def test_copies_are_drawn_anew():
    (episode,) = protocols.all_mixed(400, NAMES, (5,), copies=3)
    assert (np.bincount(episode.images) == 3).all()
    drawn = [set(episode.domain_of[episode.images == image]) for image in range(400)]
    assert any(len(domains) > 1 for domains in drawn)


def test_continual_is_the_separated_episodes_in_a_row():
    (episode,) = protocols.continual(10, NAMES, (5,), seed=3)
    separated = protocols.separated(10, NAMES, (5,), seed=3)
    assert list(episode.images) == [image for part in separated for image in part.images]
    assert list(episode.domain_of) == [0] * 10 + [1] * 10 + [2] * 10


@pytest.mark.parametrize(
    "deal", [protocols.separated, protocols.severity_mixed, protocols.all_mixed, protocols.continual]
)
def test_seed_decides(deal):
    def drawn(seed):
        return [(episode.images.tolist(), episode.domain_of.tolist()) for episode in deal(50, NAMES, (1, 5), seed=seed)]

    assert drawn(0) == drawn(0) and drawn(0) != drawn(1)


def test_limit_is_a_fixed_subset():
    (whole,), (part,) = protocols.clean(50, seed=2), protocols.clean(50, seed=2, limit=10)
    assert part.images.tolist() == whole.images[:10].tolist()
    assert len(protocols.clean(5, limit=10)[0]) == 5


def test_impossible_protocols_are_refused():
    with pytest.raises(ValueError, match="expected `limit` to be at least 1 or None, but got 0"):
        protocols.clean(5, limit=0)
    with pytest.raises(ValueError, match="the data set is empty"):
        protocols.clean(0)
    with pytest.raises(ValueError, match="expected `copies` to be at least 1, but got 0"):
        protocols.all_mixed(5, NAMES, (5,), copies=0)


def test_domains_have_readable_names():
    assert str(Domain("fog", 5)) == "fog-5" and str(protocols.CLEAN) == "clean"
