"""The adapted model as an ordinary one, and an adapter from one file."""

import copy
import importlib.util
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import cafe_tta as cafe
from cafe_tta.styles import describe

IMAGES = torch.randn(32, 3, 10, 10, generator=torch.Generator().manual_seed(3)) * 1.5 + 0.3


def adapted(source, name, **options):
    adapter = cafe.create(name, source.classifier, source.needs[cafe.METHODS[name].needs], **options)
    for _ in range(3):
        adapter(IMAGES)
    return adapter


@pytest.mark.parametrize("normalisation", ["batch", "blend", "source"])
def test_the_exported_model_is_of_the_users_class_and_has_only_its_own_hooks(source, make_network, normalisation):
    class Mine(nn.Sequential):
        pass

    mine = Mine(*make_network())
    calls = []
    mine[1].register_forward_hook(lambda *_: calls.append(1))
    classifier = cafe.split_classifier(mine.eval())
    adapter = cafe.create("infomax", classifier, normalisation=normalisation, lr=0.01)
    adapter(IMAGES)
    model = adapter.export()
    assert type(model) is Mine and model.state_dict().keys() == mine.state_dict().keys() and not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(model(IMAGES).detach(), adapter.predict(IMAGES))
    assert not torch.equal(model[0].weight, mine[0].weight)
    for layer in model.modules():
        hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
        assert all("cafe_tta" not in type(getattr(hook, "__self__", None)).__module__ for hook in hooks)
    calls.clear()
    model(IMAGES)
    assert calls  # the user's own hook is still there
    fresh = copy.deepcopy(mine)
    fresh.load_state_dict(model.state_dict())  # and its weights go back into the user's model
    torch.testing.assert_close(fresh(IMAGES), model(IMAGES))


def test_unmix_exports_the_statistics_of_its_largest_cluster(source):
    adapter = cafe.create("unmix", source.classifier, source.needs["stats"], threshold=100)  # one cluster
    for start in (0, 64):
        adapter(source.images[start : start + 64] * 1.3)
    unmixer = adapter.normaliser.unmixer
    assert len(unmixer.sizes) == 1
    model, images = adapter.export(), source.images[:128] * 1.3
    known = unmixer.clusters.nearest(unmixer.styles.embed(describe(images))) >= 0  # not strangers
    assert known.sum() > 64
    torch.testing.assert_close(model(images).detach()[known], adapter.predict(images)[known])
    assert not torch.allclose(model(images), source.classifier(images))
    new = cafe.create("unmix", source.classifier, source.needs["stats"]).export()
    torch.testing.assert_close(new(IMAGES), source.classifier(IMAGES))  # nothing seen: the source's


def test_an_export_after_a_stream_of_several_kinds_warns(source):
    adapter = cafe.create("unmix", source.classifier, source.needs["stats"])
    dark, striped = source.images[:64] * 0.05 - 1, source.images[64:128] / 4
    striped[..., ::2] += 2
    adapter(torch.cat([dark, striped]))
    assert len(adapter.clusters.sizes) > 1
    with pytest.warns(cafe.MixedExport, match="in . ways, and an ordinary model in one.*will answer others badly"):
        adapter.export()


def test_an_ensemble_is_not_exported_as_one_model(source):
    adapter = adapted(source, "bacs")
    with pytest.raises(ValueError, match="mean probabilities of 2 models, which no single model has; export one"):
        adapter.export()
    assert type(adapter.members[1].export()) is nn.Sequential
    single = adapted(source, "bacs", ensemble_size=1)
    torch.testing.assert_close(single.export()(IMAGES).softmax(1).detach(), single.predict(IMAGES).softmax(1))


@pytest.mark.parametrize("name", cafe.METHODS)
def test_an_adapter_comes_back_from_one_file(source, source_without_batchnorm, name, tmp_path):
    source = source_without_batchnorm if name == "moetta" else source
    options = {"lr": 0.02} if hasattr(cafe.METHODS[name].Config(), "lr") else {}
    adapter = adapted(source, name, **options)
    adapter.save(tmp_path / "state")
    needed = source.needs["data"] if name == "dann" else None  # images are not kept in files
    again = cafe.load_adapter(tmp_path / "state", source.classifier, needed)
    assert type(again) is type(adapter) and again.config == adapter.config and again.counters == adapter.counters
    assert torch.equal(again(IMAGES), adapter(IMAGES))
    again.reset()
    fresh = cafe.create(name, source.classifier, source.needs[adapter.needs], **options)
    assert torch.equal(again(IMAGES), fresh(IMAGES))


def test_the_file_has_the_styles_of_an_adapter_that_unmixes_without_statistics(source, tmp_path):
    styles = source.needs["stats"].styles
    adapter = cafe.create("tent", source.classifier, styles=styles, normalisation="unmix")
    adapter(IMAGES)
    adapter.save(tmp_path / "state")
    assert torch.equal(cafe.load_adapter(tmp_path / "state", source.classifier)(IMAGES), adapter(IMAGES))


def test_a_file_without_what_the_method_needs_says_so(source, tmp_path):
    adapter = adapted(source, "cafe")
    small, whole = adapter.save(tmp_path / "small", source=False), adapter.save(tmp_path / "whole")
    assert small < whole
    with pytest.raises(ValueError, match="cafe needs stats from the source domain, but got none"):
        cafe.load_adapter(tmp_path / "small", source.classifier)
    again = cafe.load_adapter(tmp_path / "small", source.classifier, source.needs["stats"])
    assert torch.equal(again(IMAGES), adapter(IMAGES))
    other = copy.deepcopy(source.classifier)
    nn.init.zeros_(other.head.bias)
    with pytest.raises(ValueError, match="whole does not belong to this classifier: 1 of"):
        cafe.load_adapter(tmp_path / "whole", other)
    with pytest.raises(TypeError, match="expected a SplitClassifier"):
        cafe.load_adapter(tmp_path / "whole", nn.Linear(2, 2))


@pytest.mark.skipif(not importlib.util.find_spec("onnxscript"), reason="needs the packages onnx and onnxscript")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch.export's own
@pytest.mark.parametrize("method", ["cafe", "cafe-plus", "t3a"])
def test_the_example_writes_an_onnx_file_that_answers_as_the_adapter_does(source, tmp_path, method):
    """Computed by ONNX's own reference implementation, in NumPy."""
    from onnx.reference import ReferenceEvaluator

    example = runpy.run_path(str(Path(__file__).parents[1] / "examples/export_onnx.py"))
    adapter = adapted(source, method)
    example["export"](adapter, IMAGES[:8], tmp_path / "model.onnx")
    runtime = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    expected = adapter.export()(IMAGES).detach()
    for count in (1, 8, len(IMAGES)):  # any number of images
        (logits,) = runtime.run(None, {"images": IMAGES[:count].numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected[:count], rtol=1e-3, atol=1e-4)
