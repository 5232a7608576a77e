"""The loop over batches: the same answers as calling the adapter by hand, and nothing else is changed."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import cafe_tta as cafe
from cafe_tta import stream


@dataclass(frozen=True)
class Batch:
    images: Tensor
    name: str = ""


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
    return cafe.split_classifier(model.train())


@pytest.fixture
def batches():
    torch.manual_seed(1)
    return [Batch(torch.randn(8, 3, 6, 6), name) for name in "abc"]


def test_answers_are_those_of_the_adapter(classifier, batches):
    adapter, twin = cafe.create("adabn", classifier), cafe.create("adabn", classifier)
    answers = list(stream.adapt(adapter, batches))
    for answer, batch in zip(answers, batches, strict=True):
        assert answer.batch is batch and torch.equal(answer.logits, twin(batch.images))
        assert answer.report == twin.report and answer.seconds > 0
    assert adapter.counters == twin.counters


def test_answers_come_one_at_a_time(classifier, batches):
    adapter = cafe.create("adabn", classifier)
    answers = stream.adapt(adapter, iter(batches))
    next(answers)
    assert adapter.counters.batches == 1


def test_evaluation_adapts_nothing(classifier, batches):
    adapter = cafe.create("infomax", classifier)
    list(stream.adapt(adapter, batches))
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    for evaluation, batch in zip(stream.evaluate(adapter, batches), batches, strict=True):
        features, logits = adapter.features_and_logits(batch.images)
        assert torch.equal(evaluation.features, features) and torch.equal(evaluation.logits, logits)
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter.state().items())


def test_a_classifier_is_evaluated_in_evaluation_mode_and_gets_its_mode_back(classifier, batches):
    frozen = cafe.create("source", classifier)
    statistics = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    for evaluation, batch in zip(stream.evaluate(classifier, batches), batches, strict=True):
        torch.testing.assert_close(evaluation.logits, frozen.predict(batch.images))
        assert not evaluation.features.requires_grad
    assert classifier.training and classifier.backbone.training
    assert all(torch.equal(statistics[name], tensor) for name, tensor in classifier.state_dict().items())


def test_an_empty_batch_gives_empty_answers(classifier):
    (evaluation,) = stream.evaluate(classifier, [Batch(torch.zeros(0, 3, 6, 6))])
    assert evaluation.features.shape == (0, 96) and evaluation.logits.shape == (0, 4)
