"""The table of methods says what is measured here: passes, smallest batches, layers, and what is kept."""

from pathlib import Path

import pytest
import torch
from torch import nn

import cafe_tta as cafe
from cafe_tta.methods.page import HEADS, capabilities, page
from cafe_tta.traits import LAYERS

from .loose import LOOSE

ROOT = Path(__file__).parents[1]
SETTINGS = LOOSE | {
    "rotta": {"capacity": 2},  # a memory of 2 images is full at once
    "cafe-plus": {"gate": False},  # which takes the first of few images for one of the source's
}


@pytest.fixture
def sources(source, source_with_layernorm, source_without_batchnorm):
    return dict(zip(LAYERS, (source, source_with_layernorm, source_without_batchnorm), strict=True))


def create(name, source, **options):
    needs = source.needs[cafe.METHODS[name].needs]
    return cafe.create(name, source.classifier, needs, **{**SETTINGS.get(name, {}), **options})


def passes(adapter, images):
    """Images that went through the network, and images whose activations got a gradient, in units of the batch."""
    classifier = getattr(adapter, "members", [adapter])[0].classifier  # one member of an ensemble
    sizes, backward = [], set()

    def begin(module, args):
        sizes.append(len(args[0]))

    def watch(module, args, output):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            number = len(sizes) - 1
            output.register_hook(lambda gradient: backward.add(number))

    hooks = [classifier.backbone.register_forward_pre_hook(begin)]
    hooks += [module.register_forward_hook(watch) for module in classifier.backbone.modules()]
    adapter(images)
    for hook in hooks:
        hook.remove()
    return sum(sizes) / len(images), sum(sizes[number] for number in backward) / len(images)


def possible(name):
    """The networks that a method takes."""
    return [layer for layer, least in zip(LAYERS, cafe.METHODS[name].traits.smallest, strict=True) if least]


@pytest.mark.parametrize("name", cafe.METHODS)
def test_passes(name, sources):
    traits = cafe.METHODS[name].traits
    made = sources[possible(name)[0]]
    images = made.images[:60] * 1.7 + 0.4  # as many as a batch of source images has
    adapter = create(name, made, **({"capacity": 60} if name == "rotta" else {}))
    forward, backward = passes(adapter, images)
    assert traits.forward[0] <= forward <= traits.forward[1] and traits.backward[0] <= backward <= traits.backward[1]
    assert adapter.report.stepped or not adapter.adapts
    if traits.forward[0] == traits.forward[1]:
        return
    if name == "cotta":
        assert forward == 34 and passes(create(name, made, min_confidence=0.0), images)[0] == 3
    elif name == "rotta":
        assert forward > 1 and backward > 0 and passes(adapter, images[:-1]) == (1, 0)
    else:
        assert forward > 1  # and one pass where nothing is learnt
        assert passes(create(name, made, max_entropy=1e-6), images) == (1, 0)


@pytest.mark.parametrize("name", cafe.METHODS)
def test_smallest_batches(name, sources):
    """As few images as the table says are learnt from, fewer are not; networks it refuses are refused."""
    for (layer, made), least in zip(sources.items(), cafe.METHODS[name].traits.smallest, strict=True):
        if least is None:
            with pytest.raises(ValueError, match=r"BatchNorm layers|LayerNorm and GroupNorm but the first"):
                create(name, made)
            continue
        adapter = create(name, made)
        for images in made.corrupted.split(least)[:2]:
            assert torch.isfinite(adapter(images)).all()
        assert adapter.counters.steps or not adapter.adapts, (layer, adapter.report.reason)
        adapter = create(name, made)
        for image in made.corrupted[:2]:
            assert torch.isfinite(adapter(image[None])).all()
            assert adapter.report.stepped or adapter.report.reason
        assert (adapter.counters.steps == 0) == (least == 2) or not adapter.adapts, layer


@pytest.mark.parametrize("name", cafe.METHODS)
def test_what_is_kept(name, sources):
    made = sources[possible(name)[0]]
    adapter = create(name, made)
    adapter(made.corrupted)
    kept = [key for key in adapter.state() if not key.startswith(("classifier.", "optimizer."))]
    assert bool(kept) == (cafe.METHODS[name].traits.keeps != "nothing"), kept


def test_the_page_is_what_the_command_prints():
    assert (ROOT / "docs/methods.md").read_text() == page(), "cafe-tta methods --markdown > docs/methods.md"


def test_a_method_of_your_own_has_a_row():
    class Mine(cafe.Infomax):
        name, traits = "mine", None

    row = capabilities("mine", Mine)
    assert len(row) == len(HEADS) and row[:3] == ("mine", "nothing", "?")
    assert "### mine" in page({"mine": Mine})


def test_layers_of_the_networks(sources):
    kinds = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    for made, kind in zip(sources.values(), kinds, strict=True):
        found = [type(m) for m in made.classifier.modules() if isinstance(m, kinds)]
        assert len(found) == 2 and set(found) == {kind}
