"""Streams and runs: the right images, the right count of hits, the right distances."""

import numpy as np
import pytest
import torch

import cafe_tta as cafe
from cafe_tta import corruptions, data, models
from cafe_tta.bench import evaluate as evaluate_module
from cafe_tta.bench import protocols
from cafe_tta.bench.evaluate import Stream, distance_before, evaluate
from cafe_tta.distributed import Share

PREPROCESSING = models.Preprocessing(size=32, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))


@pytest.fixture(scope="module")
def digits():
    return data.load("digits:test")


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    return cafe.split_classifier(models.build("cafe:digits-resnet", num_classes=10).eval())


def mixed(digits, seed=0, limit=60):
    (episode,) = protocols.all_mixed(len(digits), corruptions.NAMES, (5,), seed, limit=limit)
    return Stream(digits, episode, PREPROCESSING)


def test_stream_gives_each_image_with_its_corruption_and_label(digits):
    stream = mixed(digits)
    (batch,) = stream.batches(100)
    for position in range(len(stream)):
        number = int(stream.episode.images[position])
        domain = stream.episode.domains[stream.episode.domain_of[position]]
        image = corruptions.corrupt(
            digits.images([number]), domain.corruption, severity=5, seed=0, preset="cifar", indices=[number]
        )
        assert torch.equal(batch.images[position], PREPROCESSING(image)[0])
        assert batch.labels[position] == digits.labels[number]


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")  # few images for the groups
def test_a_method_of_one_pass_answers_offline_as_online(digits, classifier):
    adapter, stream = cafe.create("t3a", classifier, batch_size=10), mixed(digits)
    online, offline = (evaluate(adapter, stream, mode) for mode in ("online", "offline"))
    assert torch.equal(online.hits, offline.hits) and offline.forward == online.forward == len(stream)
    reference = cafe.source.Reference(
        cafe.FeatureStats.fit(classifier, [next(stream.batches(60)).images]).group(keep_full=True)
    )
    assert evaluate(adapter, stream, "offline", reference).forward == len(stream)  # measuring is not counted


def test_stream_is_the_same_in_other_batches_and_when_it_is_too_large_to_keep(digits, monkeypatch):
    whole = torch.cat([batch.images for batch in mixed(digits).batches(60)])
    parts = torch.cat([batch.images for batch in mixed(digits).batches(7)])
    monkeypatch.setattr(evaluate_module, "LARGEST_IN_MEMORY", 0)
    streamed = torch.cat([batch.images for batch in mixed(digits).batches(13)])
    assert torch.equal(whole, parts) and torch.equal(whole, streamed)


@pytest.mark.parametrize("largest", [2**30, 0])
def test_shares_of_a_stream_make_the_whole(digits, monkeypatch, largest):
    """Five ranks, batches of 13 and of 3: some shares are empty."""
    monkeypatch.setattr(evaluate_module, "LARGEST_IN_MEMORY", largest)
    whole = mixed(digits, limit=29)
    shared = [Stream(digits, whole.episode, PREPROCESSING, share=Share(rank, 5)) for rank in range(5)]
    for batch_size in (13, 3):
        parts = [list(stream.batches(batch_size)) for stream in shared]
        for number, batch in enumerate(whole.batches(batch_size)):
            own = [part[number] for part in parts]
            assert all(part.images.shape[1:] == (3, 32, 32) for part in own)
            assert max(len(part.labels) for part in own) - min(len(part.labels) for part in own) <= 1
            assert torch.equal(torch.cat([part.images for part in own]), batch.images)
            assert torch.equal(torch.cat([part.labels for part in own]), batch.labels)
        parts = [list(stream.batches(batch_size, in_turns=True)) for stream in shared]
        for number, batch in enumerate(whole.batches(batch_size)):
            own = [part[number] for part in parts]
            assert [len(part.images) for part in own] == [len(batch.images) * (number % 5 == r) for r in range(5)]
            assert torch.equal(own[number % 5].images, batch.images)


def test_clean_episode_is_not_corrupted(digits):
    (episode,) = protocols.clean(len(digits), limit=9)
    (batch,) = Stream(digits, episode, PREPROCESSING).batches(9)
    assert torch.equal(batch.images, PREPROCESSING(digits.images(episode.images.tolist())))


def test_run_counts_by_hand(digits, classifier):
    """Online, offline, overall and by corruption, against a loop."""
    stream = mixed(digits)
    for mode in ("online", "offline"):
        adapter = cafe.create("adabn", classifier, batch_size=20)
        outcome = evaluate(adapter, stream, mode)
        twin = cafe.create("adabn", classifier)
        online = [twin(batch.images).argmax(1) == batch.labels for batch in stream.batches(20)]
        offline = [twin.predict(batch.images).argmax(1) == batch.labels for batch in stream.batches(256)]
        hits = torch.cat(online if mode == "online" else offline)
        assert torch.equal(outcome.hits, hits)
        assert outcome.accuracy == pytest.approx(hits.double().mean().item())
        for name, value in outcome.by_domain.items():
            own = [i for i in range(60) if str(stream.episode.domains[stream.episode.domain_of[i]]) == name]
            assert value == pytest.approx(np.mean([hits[i].item() for i in own]))
        assert outcome.images == 60 and outcome.steps == 3 and outcome.seconds > 0


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")  # few images for eight groups
def test_run_measures_the_distance_of_the_adapted_features(digits, classifier):
    train = data.load("digits:train")
    images = PREPROCESSING(train.images(range(200)))
    stats = cafe.FeatureStats.fit(classifier, [images])
    source = stats.group(8, keep_full=True)
    reference = cafe.Reference(source)
    stream = mixed(digits)
    outcome = evaluate(cafe.create("source", classifier), stream, "offline", reference)
    with torch.no_grad():
        features = torch.cat([classifier.backbone(batch.images) for batch in stream.batches(60)])
    theirs = cafe.FeatureStats.from_features(features)
    assert outcome.distance.frechet == pytest.approx(
        cafe.metrics.frechet_distance(theirs.mean, theirs.cov, stats.mean, stats.cov), rel=1e-6
    )
    alignment = cafe.losses.alignment(features, source, 1e-3, samples_per_dim=2.0).item()
    assert outcome.distance.alignment == pytest.approx(alignment, rel=1e-5)
    assert distance_before(classifier, stream, reference) == outcome.distance  # the source classifier never adapts


def test_labels_never_reach_the_adapter(digits, classifier):
    """Other labels, same answers: hits change, the adapted weights do not."""
    stream, other = mixed(digits), mixed(digits)
    other._labels = (other._labels + 1) % 10
    weights = []
    for each in (stream, other):
        adapter = cafe.create("infomax", classifier, batch_size=20)
        evaluate(adapter, each, "online")
        weights.append(adapter.state())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_set_without_labels_is_refused(classifier):
    images = data.ArraySet("mine", np.zeros((5, 32, 32, 3), dtype=np.uint8), None, None)
    (episode,) = protocols.clean(5)
    with pytest.raises(ValueError, match="mine has no labels: there is nothing to measure an accuracy with"):
        Stream(images, episode, PREPROCESSING)


def test_offline_run_goes_on_for_a_method_that_wants_more(digits, classifier):
    """DANN's iterations are more than one pass; online it is one pass all the same."""
    stream = mixed(digits)
    loader = [(PREPROCESSING(digits.images(range(20))), torch.from_numpy(digits.labels[:20]))]
    adapter = cafe.create("dann", classifier, loader, iterations=7, batch_size=20, hidden=4)
    assert evaluate(adapter, stream, "offline").steps == 7
    assert evaluate(adapter, stream, "online").steps == 3
