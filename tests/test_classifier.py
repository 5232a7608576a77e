"""Splitting models of every make in front of their head."""

import copy
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from cafe_tta import create, models
from cafe_tta.classifier import SplitClassifier, evaluating, split_classifier
from cafe_tta.source.stats import FeatureStats

models.import_torchvision()  # before timm, which imports it
pytest.importorskip("timm")

SIZE = 64
NAMES = [
    "timm:resnet26",
    "timm:convnext_atto",
    "timm:vit_tiny_patch16_224",
    "timm:efficientnet_b0",
    "timm:mobilenetv3_small_050",
    "torchvision:resnet18",
    "torchvision:convnext_tiny",
    "torchvision:efficientnet_b0",
    "torchvision:mobilenet_v3_small",
    "cafe:digits-resnet",
]
Make = Callable[[], nn.Module]


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 9), nn.ReLU(), nn.Linear(9, 5))


def small_vit() -> nn.Module:
    """torchvision's vit_b_16 has the same parts, and would take seconds to make."""
    vit = models.import_torchvision().models.VisionTransformer
    return vit(image_size=SIZE, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)


def cases() -> list[object]:
    named = [pytest.param(lambda name=name: models.build(name, 5, size=SIZE), id=name) for name in NAMES]
    return [*named, pytest.param(small_vit, id="torchvision:vit"), pytest.param(sequential, id="sequential")]


def pictures(count: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", cases())
def test_features_are_what_the_head_receives_and_the_original_stays_untouched(make: Make) -> None:
    torch.manual_seed(0)
    model = make().eval()
    images = pictures()
    before = copy.deepcopy(model.state_dict())
    layers = [str(layer) for layer in model.modules()]
    classifier = split_classifier(model)

    received: list[Tensor] = []
    head = model.get_submodule(classifier.feature_layer)
    handle = head.register_forward_pre_hook(lambda _, args: received.append(args[0]))
    with torch.no_grad():
        expected = model(images)
        features, logits = classifier.features_and_logits(images)
    handle.remove()

    assert torch.equal(features, received[0])
    assert torch.equal(logits, expected)
    assert torch.equal(classifier(images), expected)
    assert classifier.num_classes == 5
    assert features.shape == (2, classifier.num_features)
    assert [str(layer) for layer in model.modules()] == layers
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    ours = {parameter.data_ptr() for parameter in classifier.parameters()}
    assert ours.isdisjoint(parameter.data_ptr() for parameter in model.parameters())


def test_a_named_head_is_taken() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.main, self.auxiliary = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, images: Tensor) -> Tensor:
            return self.main(self.body(images).relu())

    model = TwoHeads()
    classifier = split_classifier(model, head="main")
    images = torch.randn(3, 4)
    assert torch.equal(classifier(images), model(images))
    with pytest.raises(ValueError, match="the model never used `auxiliary`; name the layer that makes the logits"):
        split_classifier(model)(images)


def test_a_split_classifier_is_split_already() -> None:
    classifier = split_classifier(sequential())
    assert split_classifier(classifier) is classifier


def test_errors_say_what_to_do() -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    wanted = r"with a linear head \(torch.nn.Linear\), but Sequential has none; .*: make the last layer one, and pass"
    with pytest.raises(ValueError, match=wanted):
        split_classifier(convolutions)
    with pytest.raises(ValueError, match="the model has no layer `head`; linear layers of this model: 1, 3"):
        split_classifier(sequential(), head="head")
    with pytest.raises(
        ValueError, match="expected `2` to be a linear layer, but it is ReLU; linear layers of this model: 1, 3"
    ):
        split_classifier(sequential(), head="2")
    with pytest.raises(ValueError, match="layers before its linear head, but got a single linear layer"):
        split_classifier(nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, but got str"):
        split_classifier("timm:resnet26")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    with pytest.raises(TypeError, match="got a TorchScript model, whose head cannot be taken off"):
        split_classifier(torch.jit.trace(sequential(), pictures()))


class Ends(nn.Module):
    """A network whose `forward` ends in a function of the logits."""

    def __init__(self, end: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body, self.end = sequential(), end

    def forward(self, images: Tensor) -> object:
        return self.end(self.body(images))


def test_what_follows_the_head_is_noticed_when_it_is_split() -> None:
    with pytest.raises(ValueError, match=r"what `0.3` makes, but it goes on with `1` \(Softmax\); remove that"):
        split_classifier(nn.Sequential(sequential(), nn.Softmax(1)))
    with pytest.raises(ValueError, match=r"what `0.3` makes, but it goes on with `1` \(BatchNorm1d\)"):
        split_classifier(nn.Sequential(sequential(), nn.BatchNorm1d(5)))
    with pytest.raises(ValueError, match=r"its `forward` computes something else from that \(a softmax"):
        split_classifier(Ends(lambda logits: logits.log_softmax(1)))
    with pytest.raises(ValueError, match="it returns a dict without `logits`"):
        split_classifier(Ends(lambda logits: {"scores": logits}))


def test_what_follows_the_head_is_noticed_when_images_come() -> None:
    """Where no noise can be made that the model takes for images, the split itself says nothing."""
    model = Ends(lambda logits: logits / 2)
    model.register_forward_pre_hook(lambda _, args: args[0] if args[0].dim() == 5 else 1 / 0)
    classifier = split_classifier(model)
    with pytest.raises(ValueError, match="its `forward` computes something else"):
        classifier(torch.zeros(2, 3, SIZE, SIZE, 1))


Output = namedtuple("Output", "logits loss")


@pytest.mark.parametrize(
    "end",
    [
        lambda logits: SimpleNamespace(logits=logits, loss=None),
        lambda logits: {"loss": None, "logits": logits},
        lambda logits: (logits, logits.sum()),
        lambda logits: Output(logits, None),
    ],
    ids=["object", "dict", "tuple", "namedtuple"],
)
def test_logits_may_come_inside_something(end: Callable[[Tensor], object]) -> None:
    model = Ends(end)
    assert torch.equal(split_classifier(model)(pictures()), model.body(pictures()))


def test_two_heads_that_are_averaged_are_refused() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.head_dist = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, images: Tensor) -> Tensor:
            features = self.body(images)
            return (self.head(features) + self.head_dist(features)) / 2

    with pytest.raises(ValueError, match=r"what `head_dist` makes, but it combines that with .*`head` \(a second head"):
        split_classifier(Distilled())


def test_a_convolution_that_is_averaged_is_a_linear_head() -> None:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 6, 3), nn.ReLU()]
    pooled = nn.Sequential(*body, nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    after = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 4, 1), nn.Flatten())
    for model, name in ((pooled, "2"), (after, "3")):
        classifier = split_classifier(model)
        assert (classifier.feature_layer, classifier.num_features, classifier.num_classes) == (name, 6, 4)
        assert torch.allclose(classifier(pictures()), model(pictures()), atol=1e-6)
    with pytest.raises(ValueError, match=r"ends in a convolution, `2`, and does more with its output than average it"):
        split_classifier(nn.Sequential(*body, nn.Conv2d(6, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    with pytest.raises(ValueError, match=r"ends in a convolution, `classifier.1`.*replace its end by an average pool"):
        split_classifier(models.build("torchvision:squeezenet1_1", 5))


def test_models_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="4 of the model's 4 tensors are on the meta device, without values"):
        split_classifier(sequential().to("meta"))
    with pytest.raises(ValueError, match="lazy layers without weights yet; call it once"):
        split_classifier(nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.Linear(5, 3)))


def test_splitting_leaves_random_numbers_and_statistics_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    classifier = split_classifier(model)
    assert torch.equal(torch.get_rng_state(), state) and classifier.backbone.model[1].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert classifier.backbone.model[1].num_batches_tracked == 0


def test_features_of_another_shape_are_refused() -> None:
    classifier = SplitClassifier(nn.Identity(), nn.Linear(4, 2), "fc")
    with pytest.raises(ValueError, match=r"features of shape \(batch, 4\) to `fc`, but got \(2, 3, 4\)"):
        classifier(torch.zeros(2, 3, 4))


def test_fingerprints_tell_classifiers_apart_and_ignore_precision() -> None:
    classifier = split_classifier(sequential())
    same, other = copy.deepcopy(classifier).double(), copy.deepcopy(classifier)
    with torch.no_grad():
        other.head.bias[0] += 1
    assert same.fingerprint() == classifier.fingerprint()
    changed = [name for name, digest in other.fingerprint().items() if digest != classifier.fingerprint()[name]]
    assert changed == ["head.bias"]


def test_evaluating_gives_every_layer_its_mode_back() -> None:
    model = sequential()
    model[2].eval()
    with evaluating(model):
        assert not any(layer.training for layer in model.modules())
    assert [layer.training for layer in model] == [True, True, False, True]


# Methods on models that are not plain ResNets


@pytest.fixture(scope="module", params=["timm:efficientnet_b0", "timm:vit_tiny_patch16_224"], ids=["batchnorm", "vit"])
def prepared(request: pytest.FixtureRequest) -> tuple[str, SplitClassifier, object]:
    torch.manual_seed(0)
    classifier = split_classifier(models.build(request.param, 5, size=32).eval())
    images = pictures(64)[..., :32, :32]
    features = FeatureStats.fit(classifier, images.split(32))
    return request.param, classifier, features.group(num_groups=40, max_group_size=8)


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")
@pytest.mark.parametrize("method", ["cafe", "tent", "infomax", "adabn"])
def test_methods_take_a_step(prepared: tuple[str, SplitClassifier, object], method: str) -> None:
    name, classifier, source = prepared
    before = classifier.fingerprint()
    if method == "adabn" and "vit" in name:
        with pytest.raises(
            ValueError, match="adabn adapts the statistics of BatchNorm layers, but this classifier has none"
        ):
            create(method, classifier, source)
        return
    adapter = create(method, classifier, source)
    images = pictures(16, seed=1)[..., :32, :32] * 2 + 1
    first = adapter(images)
    assert adapter.report is not None and adapter.report.stepped
    assert torch.isfinite(first).all()
    assert adapter.classifier.fingerprint() != before or method == "tent"  # Tent's copy has lost its statistics
    assert not torch.equal(adapter(images), first) or method == "adabn"  # AdaBN answers with the batch's statistics
    adapter.reset()
    assert torch.equal(adapter(images), first)
    assert classifier.fingerprint() == before


def test_loaders_of_dictionaries_and_what_is_no_loader() -> None:
    classifier, images = split_classifier(sequential()), pictures(8)
    expected = FeatureStats.fit(classifier, [images]).mean
    for batch, key in (({"image": images}, None), ({"pixel_values": images, "labels": 0}, None), ({"x": images}, "x")):
        assert torch.equal(FeatureStats.fit(classifier, [batch], key=key).mean, expected)
    with pytest.raises(TypeError, match=r"images under image, images, .*the batches have x, y; say which: .*key="):
        FeatureStats.fit(classifier, [{"x": images, "y": 0}])
    with pytest.raises(TypeError, match=r"got one tensor of shape \(8, 3, 64, 64\); pass images.split\(256\)"):
        FeatureStats.fit(classifier, images)
    with pytest.raises(TypeError, match=r"got a data set \(TensorDataset\), which gives single images; pass torch"):
        FeatureStats.fit(classifier, torch.utils.data.TensorDataset(images))


def test_a_model_with_a_convolutional_head_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conv_nets.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    monkeypatch.chdir(tmp_path)
    preprocessing = models.Preprocessing(SIZE, (0, 0, 0), (1, 1, 1))
    model = models.build("conv_nets:build")
    models.save("model.safetensors", split_classifier(model), "conv_nets:build", preprocessing)
    loaded = models.load("conv_nets:build", weights="model.safetensors")
    assert loaded.num_classes == 4 and torch.equal(loaded.model(pictures()), model(pictures()))
