"""The gate: no step on batches that look like the source, steps on those that do not."""

import pytest
import torch

import cafe_tta as cafe


@pytest.fixture
def gated(source):
    return cafe.create("cafe", source.classifier, source.needs["stats"], gate=True)


def test_source_batches_are_answered_by_the_source_classifier(source, gated):
    for number in range(0, 160, 40):
        images = source.images[number : number + 40]
        assert torch.equal(gated(images), source.classifier(images).detach())
        assert not gated.report.stepped and "looks like the source" in gated.report.reason
    assert gated.counters.steps == 0


def test_corrupted_batches_are_adapted_to_as_without_the_gate(source):
    """However well they are adapted to: it is the source classifier that looks at them."""
    stats, options = source.needs["stats"], {"gate_patience": 2, "lr": 0.01}
    gated, plain = (cafe.create("cafe", source.classifier, stats, gate=gate, **options) for gate in (True, False))
    for _ in range(20):
        assert torch.equal(gated(source.corrupted), plain(source.corrupted))
    assert gated.counters.steps == 20


def test_an_adapted_model_leaves_source_batches_to_the_source_classifier(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], gate=True, gate_patience=3, lr=0.01)
    for _ in range(3):
        adapter(source.corrupted)
    learnt = {name: tensor.clone() for name, tensor in adapter.state().items()}
    assert not torch.equal(adapter.predict(source.images[:40]), source.classifier(source.images[:40]))
    assert torch.equal(adapter(source.images[:40]), source.classifier(source.images[:40]).detach())
    assert not adapter.report.stepped
    assert all(torch.equal(tensor, learnt[name]) for name, tensor in adapter.state().items())  # nothing is lost
    with pytest.raises(ValueError, match="cannot read images"):
        adapter(source.images[:40].repeat(1, 2, 1, 1))
    assert all(torch.equal(tensor, learnt[name]) for name, tensor in adapter.state().items())


def test_gate_looks_again_after_its_patience(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], gate=True, gate_patience=3, lr=0.0)
    adapter.normaliser.kind = "source"  # nothing moves here: only the gate is watched
    stepped = []
    for images in [source.corrupted] * 2 + [source.images[:48]] * 4:
        adapter(images)
        stepped.append(adapter.report.stepped)
    assert stepped == [True, True, True, False, False, False]


def test_threshold_falls_with_the_size_of_the_batch_and_grows_with_the_margin(source):
    known = source.needs["stats"].meta["alignment"]
    assert set(known["largest"]) == {"16", "32", "64"}  # of 240 source images
    reference = cafe.Reference(source.needs["stats"], margin=1.0)
    values = [reference.threshold(size) for size in (1, 16, 20, 32, 50, 64, 1000)]
    assert values == sorted(values, reverse=True)
    assert values[0] == values[1] == pytest.approx(known["largest"]["16"])
    assert values[-1] == pytest.approx(known["largest"]["64"])
    assert cafe.Reference(source.needs["stats"], margin=2.0).threshold(20) == pytest.approx(2 * values[2])


def test_statistics_without_a_sample_cannot_have_a_gate(source):
    plain = cafe.FeatureStats(source.feature_stats.mean, source.feature_stats.cov, 240, source.feature_stats.meta)
    with pytest.raises(ValueError, match="gate needs to know how source batches look"):
        cafe.create("cafe", source.classifier, plain.group(3), gate=True)
