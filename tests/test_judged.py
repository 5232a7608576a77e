"""`Judged`: steps that make other images of the stream worse are taken back; otherwise it is the adapter it wraps."""

import copy
from dataclasses import replace

import pytest
import torch

import cafe_tta as cafe
from cafe_tta import checks
from cafe_tta.judge import Figures, Judge
from cafe_tta.judged import FEWEST, WHEN_FULL, WHILE_FILLING


def weather(count, seed=0, gain=1.7, bias=0.4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 10, 10, generator=generator) * gain + bias


def make(source, method="cafe", judged=None, **options):
    adapter = cafe.create(method, source.classifier, source.needs[cafe.METHODS[method].needs], **options)
    return cafe.Judged(adapter, source.needs["stats"], **({"every": 64} | (judged or {})))


def spoil(judged):
    """Harm that BatchNorm does not undo: the last layer before the features gives something else."""
    with torch.no_grad():
        norms = [m for m in judged.adapter.classifier.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        norms[-1].weight.mul_(9).add_(3)


def expect_state(judged, expected):
    for name, tensor in expected.items():
        assert torch.equal(judged.adapter.state()[name], tensor), name


# Like the adapter it wraps


@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
@pytest.mark.parametrize("method", ["cafe", "cafe-plus", "tent", "t3a", "rotta", "bacs"])
def test_a_judged_adapter_keeps_the_contract_of_adapters(source, method, check):
    check(lambda: make(source, method, {"every": 1, "images": FEWEST}), source.corrupted)


@pytest.mark.parametrize("method", ["cafe", "cafe-plus", "tent", "unmix"])
def test_without_an_objection_it_answers_as_the_adapter_alone_does(source, method):
    judged, alone = make(source, method), make(source, method).adapter
    judged.judge.objection = lambda ours, others: ""
    for seed in range(6):
        images = weather(64, seed)
        assert torch.equal(judged(images), alone(images))
        assert not judged.report.rolled_back
    assert judged.counters == alone.counters and judged.name == method and judged.config == alone.config
    assert judged.counters.steps == 6 and judged.needs == alone.needs


# Taking back


def test_a_harmful_step_is_taken_back_bit_for_bit_and_its_batch_answered_without_it(source):
    judged = make(source, lr=50.0)
    images = weather(64)
    logits = judged(images)
    assert judged.report.rolled_back and not judged.report.stepped
    assert judged.report.reason.startswith("rolled back: its alignment loss is ")
    assert judged.counters.steps == judged.counters.rolled_back == 1
    fresh = make(source, lr=50.0)
    expect_state(judged, fresh.adapter.state())
    assert torch.equal(judged.predict(images), source.classifier(images).detach())
    assert torch.equal(logits, fresh.features_as_answered(images)[1])


def test_steps_between_two_checks_are_taken_back_together(source):
    judged = make(source, judged={"every": 192}, lr=0.05)
    first = copy.deepcopy(judged.adapter.state())
    for seed in range(2):
        judged(weather(64, seed))
        assert judged.report.stepped and not judged.report.rolled_back
    spoil(judged)
    judged(weather(64, 2))
    assert judged.report.rolled_back and judged.counters.rolled_back == 3
    expect_state(judged, first)


def test_it_goes_back_to_the_last_check_and_not_to_the_source(source):
    judged = make(source)
    for seed in range(4):
        judged(weather(64, seed))
        assert judged.report.stepped
    good = copy.deepcopy(judged.adapter.state())
    spoil(judged)
    judged(weather(64, 9))
    assert judged.report.rolled_back
    expect_state(judged, good)


def test_what_turns_out_worse_than_the_source_model_is_given_up_for_it(source):
    judged = make(source)
    judged(weather(64))
    spoil(judged)  # as if a bad model had passed every check so far
    judged._last = judged._best = copy.deepcopy(judged.adapter.state())
    judged(weather(64, 1))
    assert judged.report.rolled_back and "that of the source model" in judged.report.reason
    assert torch.equal(judged.predict(source.images), source.classifier(source.images).detach())
    assert judged.counters.batches == 2  # it goes on counting


def test_the_verdict_is_that_of_the_judge_on_the_validation_images(source):
    """An independent computation: one step by hand, both models measured by `Judge` on the images that were kept."""
    for lr in (1e-3, 0.5, 50.0):
        judged = make(source, lr=lr)
        judged(weather(64))  # the first batch; its images are the first validation images
        before = copy.deepcopy(judged)
        judged(weather(64, 1))
        alone, last = copy.deepcopy(before.adapter), copy.deepcopy(before.adapter)
        alone(weather(64, 1))
        judge = Judge(cafe.Reference(source.needs["stats"]), 4, agree=True)
        kept = before.validation.images
        with torch.no_grad():
            features = source.classifier.backbone(kept)
        theirs = judge.measure(features, source.classifier.head(features).detach())
        ours, earlier = (judge.measure(*one.features_as_answered(kept)) for one in (alone, last))
        worse = judge.worse(ours, theirs, "") or judge.worse(ours, earlier, "")
        assert judged.report.rolled_back == bool(worse), lr


def test_one_distance_alone_takes_nothing_back(source):
    judge = make(source).judge
    far, near = Figures((2.0,), (1.0,), (0.1,), 4.0, True), Figures((1.0,), (1.0,), (0.1,), 4.0, True)
    assert judge.worse(far, near, "it") == ""
    assert judge.worse(replace(far, frechet=(2.0,)), near, "it") == "its alignment loss is 2.00 times that of it (2)"
    assert Judge(judge.reference, 4).worse(far, near, "it") != ""  # the server is stricter


def test_a_method_without_statistics_is_judged_by_collapse(source):
    classifier = copy.deepcopy(source.classifier)
    with torch.no_grad():  # predicts all of the classes
        classifier.head.weight.mul_(50)
        classifier.head.bias.copy_(-classifier.head.weight @ classifier.backbone(source.images).mean(0))
    judged = cafe.Judged(cafe.create("infomax", classifier), every=64)
    assert judged.judge.reference is None and judged.drift is None
    judged(source.images[:64])
    assert judged.report.stepped
    with torch.no_grad():
        judged.adapter.classifier.backbone.model[4].bias.sub_(50)  # all features are 0 behind the ReLU
    judged(source.images[64:128])
    assert judged.report.rolled_back and "a collapse" in judged.report.reason


# Validation images


def test_the_images_that_are_kept_are_bounded_and_of_the_stream(source):
    judged = make(source, judged={"images": 20})
    stream = [weather(32, seed) for seed in range(12)]
    for number, images in enumerate(stream):
        judged(images)
        assert len(judged.validation.images) == min(20, (number + 1) * 32 // WHILE_FILLING)
    every = torch.cat(stream)
    found = [int((every == image).flatten(1).all(1).nonzero()[0]) for image in judged.validation.images]
    assert len(set(found)) == 20
    assert any(index >= 11 * 32 for index in found) and any(index < 10 * 32 for index in found)
    assert sum(index % WHEN_FULL == 0 for index in found) >= 10
    with torch.no_grad():
        assert torch.allclose(
            judged.validation.features, source.classifier.backbone(judged.validation.images), atol=1e-6
        )


def test_images_of_another_size_take_the_place_of_all(source):
    judged = make(source)
    judged(weather(64))
    larger = torch.nn.functional.interpolate(weather(64, 1), scale_factor=2)
    judged(larger)
    assert (
        judged.validation.images.shape[2:] == (20, 20)
        and len(judged.validation.images) == len(judged.validation.features) > 0
    )
    judged(larger)
    assert len(judged.validation.images) > FEWEST


def test_single_images_are_judged_when_there_are_enough(source):
    judged = make(source, "cafe-plus", {"every": 16, "images": FEWEST})
    for image in weather(80).split(1):
        judged(image)
    assert judged.counters.images == 80 and len(judged.validation.images) == FEWEST


def test_drift_tells_clean_from_corrupted_images(source):
    clean, bad = make(source), make(source)
    for part in source.images.split(60):
        clean(part)
    for seed in range(4):
        bad(weather(60, seed, gain=0.5, bias=1.5))
    assert 0.6 < clean.drift < 1.4 and bad.drift > 2 * clean.drift
    assert clean.report.drift == clean.drift
    gated = make(source, gate=True).adapter
    assert gated.drift is None
    gated(weather(60))
    assert gated.drift == gated.report.drift > 1


# Saving


def test_a_saved_judged_adapter_goes_on_as_if_it_had_not_been_saved(source, tmp_path):
    judged = make(source, judged={"every": 64}, lr=0.02)
    for seed in range(5):
        judged(weather(32, seed))
    assert judged.validation.unchecked  # between two checks
    judged.save(tmp_path / "state.safetensors")
    again = make(source, judged={"every": 64}, lr=0.02)
    again.load(tmp_path / "state.safetensors")
    for name, tensor in judged.state().items():
        assert torch.equal(again.state()[name], tensor), name
    for seed in range(5, 12):
        assert torch.equal(judged(weather(32, seed)), again(weather(32, seed)))
        assert judged.report == again.report
    assert judged.counters == again.counters


def test_states_are_exchanged_with_adapters_that_are_not_judged(source, tmp_path):
    judged = make(source)
    judged(weather(64))
    judged.save(tmp_path / "judged.safetensors")
    plain = cafe.load_adapter(tmp_path / "judged.safetensors", source.classifier)
    assert torch.equal(plain(weather(64, 1)), copy.deepcopy(judged.adapter)(weather(64, 1)))
    plain.save(tmp_path / "plain.safetensors")
    again = make(source)
    again.load(tmp_path / "plain.safetensors")
    assert len(again.validation.images) == 0 and again.counters == plain.counters
    spoil(again)
    again(weather(64, 2))
    assert again.report.rolled_back
    assert torch.equal(again.predict(source.images), plain.predict(source.images))  # what was loaded


# What it refuses


def test_what_cannot_be_judged_is_refused(source, source_with_layernorm):
    judged = make(source)
    for other in (judged, source.classifier, None):
        with pytest.raises(TypeError, match="expected an adapter that is not judged yet, but got"):
            cafe.Judged(other)
    with pytest.raises(ValueError, match=f"expected at least {FEWEST} validation `images`, but got 3"):
        cafe.Judged(judged.adapter, images=3)
    with pytest.raises(ValueError, match="expected `every` to be at least 1, but got 0"):
        cafe.Judged(judged.adapter, every=0)
    with pytest.raises(ValueError, match="the source statistics do not belong to this classifier: "):
        cafe.Judged(judged.adapter, source_with_layernorm.needs["stats"])
