"""What a run costs: passes counted against the declared ones, memory against a known allocation."""

import numpy as np
import pytest
import torch
from torch import nn

import cafe_tta as cafe
from cafe_tta.bench import cost
from cafe_tta.bench.cost import Memory, Passes

from ..loose import LOOSE


def counted(adapter, *batches):
    passes = Passes(adapter)
    with passes.counting():
        for images in batches:
            adapter(images)
    return passes.forward / len(batches[0]), passes.backward / len(batches[0])


@pytest.mark.parametrize("name", cafe.METHODS)
def test_passes_are_those_that_the_method_declares(name, source, source_with_layernorm):
    kind = cafe.METHODS[name]
    made = source if kind.traits.smallest[0] else source_with_layernorm
    images = made.images[:60] * 1.7 + 0.4  # as many as a batch of source images has
    options = LOOSE.get(name, {}) | ({"capacity": 60} if name == "rotta" else {})
    adapter = cafe.create(name, made.classifier, made.needs[kind.needs], **options)
    networks = len(getattr(adapter, "members", [adapter]))  # of an ensemble, where traits are those of one
    forward, backward = (count / networks for count in counted(adapter, images))
    assert kind.traits.forward[0] <= forward <= kind.traits.forward[1]
    assert kind.traits.backward[0] <= backward <= kind.traits.backward[1]
    assert (backward > 0) == (kind.traits.backward[1] > 0)


def test_passes_of_every_batch_are_summed_and_only_while_counting(source):
    adapter = cafe.create("infomax", source.classifier, answer="after")
    images = source.images[:20]
    adapter(images)
    assert counted(adapter, images, images, images) == (6, 3)
    passes = Passes(adapter)
    adapter(images)
    with pytest.raises(ZeroDivisionError), passes.counting():
        adapter.predict(images)
        raise ZeroDivisionError
    adapter(images)
    assert (passes.forward, passes.backward) == (20, 0)
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks


def test_a_batch_that_is_not_learnt_from_has_no_backward_pass(source):
    adapter = cafe.create("eta", source.classifier, max_entropy=1e-6)
    assert counted(adapter, source.images[:20]) == (1, 0) and adapter.report.reason


def test_counting_changes_nothing(source):
    """Weights and answers, bit for bit."""
    plain, watched = (cafe.create("cafe", source.classifier, source.needs["stats"]) for _ in range(2))
    for images in source.images[:120].split(60):
        with Passes(watched).counting():
            logits = watched(images)
        assert torch.equal(plain(images), logits)
    states = plain.state(), watched.state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


@pytest.mark.skipif(Memory().peak is None, reason="this system cannot forget an earlier peak")
def test_memory_is_that_of_the_run():
    ballast = np.ones(2**26)  # 512 MB
    memory = Memory()
    with_ballast = memory.peak
    assert with_ballast > 512 and memory.added < 100  # it was in use when the run began
    del ballast
    memory = Memory()
    assert memory.peak < with_ballast - 400  # the earlier peak is forgotten
    np.ones(2**25).sum()  # 256 MB, freed at once
    assert memory.added == pytest.approx(256, abs=30)
    again = Memory()
    np.ones(2**24).sum()
    assert again.added == pytest.approx(128, abs=30)  # freed memory that is used again counts again


def test_memory_is_unknown_where_the_peak_cannot_be_forgotten(monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "_PROC", tmp_path / "nowhere")
    memory = Memory()
    assert memory.peak is None and memory.added is None
