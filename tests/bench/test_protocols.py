"""Protocols deal every image where they say, the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cafe_tta.bench import protocols
from cafe_tta.bench.protocols import PROTOCOLS, Domain

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


@pytest.mark.parametrize("name", PROTOCOLS)
def test_seed_decides(name):
    def drawn(seed):
        episodes = PROTOCOLS[name].episodes(50, NAMES, (1, 5), seed=seed, labels=np.arange(50) % 7)
        return [(episode.images.tolist(), episode.domain_of.tolist()) for episode in episodes]

    assert drawn(0) == drawn(0) and drawn(0) != drawn(1)


# Streams that come class by class, or that come back


LABELS = np.random.default_rng(0).integers(0, 10, 3000)


def classes_together(labels, window=64):
    """Mean number of classes in a window: 10 where they come by chance."""
    return np.mean([len(set(labels[start : start + window])) for start in range(0, len(labels) - window, window)])


def test_recurring_is_the_corruptions_over_and_over():
    (episode,) = protocols.recurring(20, NAMES, (5,), seed=3, rounds=4)
    assert list(episode.domain_of) == ([0] * 20 + [1] * 20 + [2] * 20) * 4
    visits = episode.images.reshape(12, 20)
    assert (np.sort(visits) == np.arange(20)).all() and len({tuple(visit) for visit in visits}) == 12
    assert len(protocols.recurring(20, NAMES, (5,))[0]) == protocols.ROUNDS * 60


def test_class_correlated_is_the_separated_images_in_another_order():
    episodes = protocols.class_correlated(3000, NAMES, (5,), LABELS, seed=1, limit=2000)
    for episode, same in zip(episodes, protocols.separated(3000, NAMES, (5,), seed=1, limit=2000), strict=True):
        assert (episode.name, episode.domains) == (same.name, same.domains)
        assert sorted(episode.images) == sorted(same.images) and episode.images.tolist() != same.images.tolist()
        assert classes_together(LABELS[same.images]) > 9.5 and classes_together(LABELS[episode.images]) < 4


def test_mixed_correlated_keeps_the_corruption_of_every_image():
    (episode,) = protocols.mixed_correlated(3000, NAMES, (5,), LABELS, seed=1, copies=2)
    (same,) = protocols.all_mixed(3000, NAMES, (5,), seed=1, copies=2)
    pairs = [sorted(zip(each.images.tolist(), each.domain_of.tolist(), strict=True)) for each in (episode, same)]
    assert pairs[0] == pairs[1]
    assert classes_together(LABELS[episode.images]) < 4 and classes_together(episode.domain_of) == 3


def test_a_small_delta_keeps_classes_together():
    random = np.random.default_rng
    together = [LABELS[protocols.correlated_order(LABELS, random(0), delta)] for delta in (1e-5, 0.1, 1.0, 1e6)]
    runs = [1 + int((np.diff(labels) != 0).sum()) for labels in together]  # of one class
    assert runs[0] == 10 and sorted(runs) == runs and 85 < runs[-1] <= 100  # ten classes in each of ten slots


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(1e-3, 100), st.integers(0, 1000))
def test_a_correlated_order_has_every_image_once(labels, delta, seed):
    order = protocols.correlated_order(np.array(labels), np.random.default_rng(seed), delta)
    assert sorted(order) == list(range(len(labels)))


def test_label_shift_leaves_out_images_of_rare_classes():
    (episode,) = protocols.label_shift(3000, NAMES, (5,), LABELS, seed=1, ratio=27.0)
    (whole,) = protocols.all_mixed(3000, NAMES, (5,), seed=1)
    before, after = np.bincount(LABELS, minlength=10), np.bincount(LABELS[episode.images], minlength=10)
    shares = np.sort(after / before)[::-1]
    assert shares == pytest.approx([27 ** (-rank / 9) for rank in range(10)], abs=0.5 / before.min())
    kept = dict(zip(whole.images.tolist(), whole.domain_of.tolist(), strict=True))
    assert [kept[image] for image in episode.images] == episode.domain_of.tolist()  # the same corruptions
    places = {image: place for place, image in enumerate(whole.images.tolist())}
    assert np.all(np.diff([places[image] for image in episode.images]) > 0)  # the same order
    rarest = [
        np.bincount(LABELS[protocols.label_shift(3000, NAMES, (5,), LABELS, s)[0].images]).argmin() for s in range(5)
    ]
    assert len(set(rarest)) > 1


def test_mixed_streams_with_every_image_under_every_corruption():
    (full,) = protocols.mixed_full(40, NAMES, (3, 5), seed=1)
    pairs = set(zip(full.images.tolist(), full.domain_of.tolist(), strict=True))
    assert len(full) == len(pairs) == 40 * 6 and len(set(full.domain_of[:40])) == 6
    (part,) = protocols.mixed_75k(40, NAMES, (5,), seed=1, images=7)
    (other,) = protocols.mixed_75k(40, NAMES, (5,), seed=2, images=7)
    assert len(part) == 21 and set(part.images) == set(other.images) and len(set(part.images)) == 7
    assert (np.bincount(part.domain_of) == 7).all() and part.images.tolist() != other.images.tolist()
    assert len(protocols.mixed_75k(10_000, [f"c{i}" for i in range(15)], (5,))[0]) == 75_000
    assert len(protocols.mixed_75k(10_000, NAMES, (5,), limit=4)[0]) == 12


# Options of protocols


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(protocols, "PROTOCOLS", dict(PROTOCOLS))
    return protocols.PROTOCOLS


def test_options_make_another_protocol(registry):
    name = protocols.protocol_name("recurring( rounds = 2 )")
    assert name == "recurring(rounds=2)" and len(registry[name].episodes(10, NAMES, (5,))[0]) == 60
    assert protocols.protocol_name(name) == name and registry[name].options() == {"rounds": 2}
    assert len(registry["recurring"].episodes(10, NAMES, (5,))[0]) == 150
    assert protocols.PROTOCOLS["separated"].options() == {}


def test_options_that_do_not_fit(registry):
    with pytest.raises(ValueError, match=r"recurring has no option 'round'; did you mean 'rounds'\?"):
        protocols.protocol_name("recurring(round=2)")
    with pytest.raises(ValueError, match="expected `rounds` of recurring to be a whole number, but got 'two'"):
        protocols.protocol_name("recurring(rounds=two)")
    with pytest.raises(ValueError, match="expected `delta` of class-correlated to be a number, but got 'x'"):
        protocols.protocol_name("class-correlated(delta=x)")
    with pytest.raises(ValueError, match=r"unknown protocol 'recuring'; did you mean 'recurring'"):
        protocols.protocol_name("recuring(rounds=2)")
    with pytest.raises(ValueError, match="such as delta=0.01, but got '0.01'"):
        protocols.protocol_name("class-correlated(0.01)")
    for text, error in {
        "recurring(rounds=0)": "expected `rounds` to be at least 1, but got 0",
        "label-shift(ratio=0.5)": "expected `ratio` to be at least 1, but got 0.5",
        "mixed-75k(images=0)": "expected `images` to be at least 1, but got 0",
        "mixed-correlated(delta=0)": "expected `delta` to be above 0, but got 0.0",
    }.items():
        with pytest.raises(ValueError, match=error):
            registry[protocols.protocol_name(text)].episodes(10, NAMES, (5,), labels=np.arange(10) % 2)


def test_a_stream_that_needs_labels_says_so():
    with pytest.raises(ValueError, match="the protocol label-shift needs labels, which the data set does not have"):
        PROTOCOLS["label-shift"].episodes(10, NAMES, (5,))


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


def test_a_protocol_of_your_own_has_options(registry, tmp_path, monkeypatch):
    (tmp_path / "own_protocols.py").write_text(
        "from cafe_tta.bench.protocols import clean\n\n\n"
        "def first(num_images, seed, images=3):\n"
        "    return clean(num_images, seed=seed, limit=images)\n"
    )
    monkeypatch.chdir(tmp_path)
    name = protocols.protocol_name("own_protocols.py:first(images=7)")
    assert name == "first(images=7)" and len(registry[name].episodes(20, NAMES, (5,))[0]) == 7
    assert len(registry["first"].episodes(20, NAMES, (5,))[0]) == 3
