"""Models by name and by file, preprocessing, the digits network, and torchvision's import."""

import importlib
import inspect
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cafe_tta import models, storage
from cafe_tta.classifier import split_classifier
from cafe_tta.models import LoadedModel, Preprocessing, _torchvision, import_torchvision
from cafe_tta.models.digits_resnet import DigitsResNet
from cafe_tta.models.names import stated_classes
from cafe_tta.options import describe
from cafe_tta.source.recipes import RECIPES
from cafe_tta.source.train import TrainConfig, train

import_torchvision()  # before timm, which imports it
timm = pytest.importorskip("timm")
HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def random() -> Iterator[np.random.Generator]:
    yield np.random.default_rng(0)


def pictures(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(0, 256, shape, dtype=np.uint8)


def weights_file(path: Path, model: nn.Module, **changes: Tensor | None) -> Path:
    """A file of plain weights in float16; a change of None leaves a tensor out."""
    tensors = {n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    tensors = {n.replace(".", "__"): t for n, t in tensors.items()} | changes
    kept = {n.replace("__", "."): t.contiguous() for n, t in tensors.items() if t is not None}
    safetensors.torch.save_file(kept, path)
    return path


# torchvision


def test_torchvision_and_timm_import_in_a_new_process() -> None:
    code = (
        "import cafe_tta, torchvision\n"  # which alone would fail beside a CPU build of torch
        "from cafe_tta.models import import_torchvision\n"
        "assert import_torchvision() is torchvision\n"
        "import timm\n"
        "assert torchvision.models.resnet18 and timm.create_model\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=240)


def test_naming_models_loads_neither_library() -> None:
    code = "import sys, cafe_tta.models; assert not {'timm', 'torchvision', 'PIL'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_torchvision_that_imports_by_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    monkeypatch.setattr(_torchvision, "_declare_operators", lambda: pytest.fail("not needed"))
    assert import_torchvision() is fake


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", None)
        with pytest.raises(ImportError, match=r'needs torchvision, which is not installed; .*pip install "timm'):
            import_torchvision()
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r'needs timm, which is not installed; install it with: pip install "timm'):
        models.build("timm:resnet26")


def test_other_failures_of_torchvision_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise RuntimeError("something else")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        import_torchvision()


# Preprocessing


def test_images_that_fit_are_only_normalised(random: np.random.Generator) -> None:
    images = pictures(random, 4, 32, 32, 3)
    images.setflags(write=False)  # as of a memory-mapped file
    preprocessing = Preprocessing(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), resize=36)
    prepared = preprocessing(images)
    expected = (images / 255 - np.array(preprocessing.mean)) / np.array(preprocessing.std)
    assert prepared.dtype == torch.float32 and prepared.is_contiguous()
    np.testing.assert_allclose(prepared.numpy(), expected.transpose(0, 3, 1, 2), rtol=1e-5, atol=1e-5)
    assert preprocessing(images[:0]).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("shape", [(40, 57), (61, 33), (300, 200), (20, 20)])
def test_resize_and_crop_agree_with_torchvision(random: np.random.Generator, shape: tuple[int, int]) -> None:
    transforms = import_torchvision().transforms
    images = pictures(random, 2, *shape, 3)
    preprocessing = Preprocessing(28, HALF, HALF, resize=32)
    theirs = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(28), transforms.ToTensor()])
    expected = torch.stack([theirs(Image.fromarray(image)) for image in images])
    torch.testing.assert_close(preprocessing(images) / 2 + 0.5, expected, rtol=0, atol=1e-6)


def test_without_a_crop_the_whole_image_is_resized(random: np.random.Generator) -> None:
    images = pictures(random, 2, 8, 10, 3)
    expected = [np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR)) for image in images]
    prepared = Preprocessing(32, (0, 0, 0), (1, 1, 1))(images)
    np.testing.assert_allclose(prepared.numpy(), np.stack(expected).transpose(0, 3, 1, 2) / 255, atol=1e-6)


def test_bad_images_and_options_are_refused() -> None:
    preprocessing = Preprocessing(32, HALF, HALF)
    with pytest.raises(TypeError, match="expected a numpy array of images, but got list"):
        preprocessing([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected uint8 images \(0 to 255\), but got float64"):
        preprocessing(np.zeros((1, 32, 32, 3)))
    with pytest.raises(ValueError, match=r"RGB images of shape \(N, height, width, 3\), but got \(1, 3, 32, 32\)"):
        preprocessing(np.zeros((1, 3, 32, 32), np.uint8))
    with pytest.raises(ValueError, match=r"RGB images of shape \(N, height, width, 3\), but got \(32, 32, 3\)"):
        preprocessing(np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match="expected `size` to be at least 1, but got 0"):
        Preprocessing(0, HALF, HALF)
    with pytest.raises(ValueError, match=r"expected `resize` to be at least `size` \(32\) or None, but got 30"):
        Preprocessing(32, HALF, HALF, resize=30)
    with pytest.raises(ValueError, match=r"expected `mean` to be between 0 and 1 \(of images divided by 255\)"):
        Preprocessing(32, (123.7, 116.8, 103.9), HALF)
    with pytest.raises(ValueError, match="expected `std` to be above 0"):
        Preprocessing(32, HALF, (0, 1, 1))
    with pytest.raises(ValueError, match="expected `mean` to be three numbers, but got"):
        Preprocessing(32, (0.5,), HALF)  # type: ignore[arg-type]


# Names


def test_models_come_with_their_librarys_preprocessing() -> None:
    loaded = models.load("timm:convnext_atto")
    assert loaded.num_classes == 1000 and not loaded.trained and not loaded.model.training
    config = timm.get_pretrained_cfg("convnext_atto")
    assert (loaded.preprocessing.size, loaded.preprocessing.mean) == (config.input_size[-1], config.mean)
    assert loaded.preprocessing.resize == int(config.input_size[-1] / config.crop_pct)
    loaded = models.load("torchvision:mobilenet_v3_small", num_classes=7)
    assert loaded.num_classes == 7
    assert loaded.preprocessing == models.IMAGENET
    loaded = models.load("cafe:digits-resnet", mean=(0.1, 0.2, 0.3), std=(1, 1, 1))
    assert loaded.preprocessing == Preprocessing(32, (0.1, 0.2, 0.3), (1, 1, 1))
    assert loaded.num_classes == 10


def test_transformers_are_built_for_the_size_asked_for() -> None:
    loaded = models.load("timm:vit_tiny_patch16_224", size=48, num_classes=3)
    assert loaded.preprocessing.size == 48 and loaded.preprocessing.resize is None
    assert loaded.model(torch.zeros(1, 3, 48, 48)).shape == (1, 3)


def test_resnet50_v1_strides_early_and_has_its_own_epsilon() -> None:
    model = models.build("cafe:resnet50-v1")
    plain = models.build("torchvision:resnet50")
    assert model.state_dict().keys() == plain.state_dict().keys()
    for stage in ("layer2", "layer3", "layer4"):
        assert model.get_submodule(f"{stage}.0.conv1").stride == (2, 2)
        assert model.get_submodule(f"{stage}.0.conv2").stride == (1, 1)
        assert model.get_submodule(f"{stage}.1.conv1").stride == (1, 1)
    assert model.get_submodule("layer1.0.conv1").stride == (1, 1)
    assert {layer.eps for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)} == {1e-3}
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    mean = models.default_preprocessing("cafe:resnet50-v1", model).mean
    assert mean == pytest.approx((0.48502, 0.45796, 0.4076), abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("timm:resnet26x", "timm has no model 'resnet26x'; did you mean timm:resnet26"),
        ("torchvision:resnet_18", "torchvision has no model 'resnet_18'; did you mean torchvision:resnet18"),
        ("torchvision:fcn_resnet50", "torchvision has no model 'fcn_resnet50'"),
        ("cafe:digit-resnet", r"cafe has no model 'digit-resnet'; did you mean cafe:digits-resnet\?"),
        ("tim:resnet26", r"no model 'tim:resnet26'; did you mean 'timm:resnet26'\?; expected timm:NAME"),
        ("resnet26", "no model 'resnet26'; expected timm:NAME, torchvision:NAME, cafe:NAME, or package"),
        ("timm:vit_small_patch14_dinov2", "has no head that tells classes apart; give `num_classes`"),
    ],
)
def test_unknown_names_are_told(spec: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        models.load(spec)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected either `weights` or `pretrained`, but got both"):
        models.load("timm:resnet26", weights="x.safetensors", pretrained=True)
    with pytest.raises(ValueError, match=r"go with the name of an architecture, but x.safetensors is a file"):
        models.load("x.safetensors", pretrained=True)
    with pytest.raises(ValueError, match="cafe:digits-resnet has no weights to download"):
        models.load("cafe:digits-resnet", pretrained=True)
    with pytest.raises(ValueError, match="expected `num_classes` to be at least 1, but got 0"):
        models.build("cafe:digits-resnet", 0)
    with pytest.raises(ValueError, match="no architecture 'digits-resnet'; expected timm:NAME"):
        models.build("digits-resnet")


@pytest.mark.parametrize("name", models.trained_models())
def test_trained_models_come_with_the_project(name):
    loaded = models.load(name)
    assert loaded.trained and loaded.training["test_accuracy"] > 0.3
    assert loaded.training["settings"]["recipe"] in RECIPES
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.float32}
    assert models.load_classifier(models.ModelOptions(name)).classes == loaded.classes
    assert models.trained_models()[name].stat().st_size < 5_000_000  # float16


def test_a_trained_model_is_no_architecture(tmp_path):
    safetensors.torch.save_file({"fc.bias": torch.zeros(10)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="cafe:cifar10 is a trained model, not an architecture; give it as the model"):
        models.load("cafe:cifar10", weights=tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"cafe has no model 'cifar1O'; did you mean .*cafe:cifar10"):
        models.load("cafe:cifar1O")


def test_half_precision_files_give_float32_again(tmp_path):
    network = models.build("cafe:digits-resnet", num_classes=10)
    preprocessing = models.default_preprocessing("cafe:digits-resnet", network)
    sizes = [
        models.save(tmp_path / f"{half}.safetensors", network, "cafe:digits-resnet", preprocessing, half=half)
        for half in (False, True)
    ]
    assert sizes[1] < 0.6 * sizes[0]
    again = models.load(tmp_path / "True.safetensors").model.state_dict()
    for tensor_name, tensor in network.state_dict().items():
        expected = tensor.half().float() if tensor.is_floating_point() else tensor
        assert torch.equal(again[tensor_name], expected)


def test_a_download_that_fails_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> None:
        raise OSError("Name or service not known\nand a long story")

    monkeypatch.setattr(import_torchvision().models, "get_model", offline)
    monkeypatch.setattr(timm, "create_model", offline)
    for spec in ("torchvision:resnet18", "timm:resnet26"):
        text = rf"weights of {spec} could not be downloaded \(OSError: Name or service not known\); check the internet"
        with pytest.raises(RuntimeError, match=text):
            models.load(spec, pretrained=True)


def test_pretrained_weights_are_the_papers_and_keep_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def get_model(name: str, **options: object) -> nn.Module:
        asked.update(options)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 1000))

    monkeypatch.setattr(import_torchvision().models, "get_model", get_model)
    assert models.load("torchvision:resnet50", pretrained=True).trained
    assert asked["weights"].name == "IMAGENET1K_V1"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="tell 1000 classes apart, but `num_classes` is 10; leave it out"):
        models.load("torchvision:resnet50", pretrained=True, num_classes=10)


# Files


def test_a_saved_model_comes_back_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.build("timm:mobilenetv3_small_050", 3)
    preprocessing = Preprocessing(40, (0.1, 0.2, 0.3), HALF, resize=44)
    path = tmp_path / "model.safetensors"
    size = models.save(path, model, "timm:mobilenetv3_small_050", preprocessing, ["cat", "dog", "owl"])
    assert size == path.stat().st_size
    loaded = models.load(path)
    assert isinstance(loaded, LoadedModel) and loaded.trained and not loaded.model.training
    assert loaded.architecture == "timm:mobilenetv3_small_050"
    assert (loaded.num_classes, loaded.classes) == (3, ("cat", "dog", "owl"))
    assert loaded.preprocessing == preprocessing
    state = loaded.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert models.load(str(path), mean=HALF).preprocessing == Preprocessing(40, HALF, HALF, resize=44)
    assert models.load("timm:mobilenetv3_small_050", weights=path).classes == ("cat", "dog", "owl")
    with pytest.raises(ValueError, match="holds a timm:mobilenetv3_small_050, but timm:resnet26 was asked for"):
        models.load("timm:resnet26", weights=path)
    with pytest.raises(ValueError, match="tells 3 classes apart, but `num_classes` is 5"):
        models.load(path, num_classes=5)


def test_a_split_classifier_is_saved_as_the_model_it_came_from(tmp_path: Path) -> None:
    classifier = split_classifier(DigitsResNet(4)).eval()
    path = tmp_path / "model.safetensors"
    models.save(path, classifier, "cafe:digits-resnet", Preprocessing(32, HALF, HALF))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(models.load(path).model(images), classifier(images))
    assert split_classifier(models.load(path).model).fingerprint() == classifier.fingerprint()


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    preprocessing = Preprocessing(32, HALF, HALF)
    with pytest.raises(
        ValueError, match=r"the tensors of the model are not those of cafe:digits-resnet: .* missing: `stem"
    ):
        models.save(path, nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), "cafe:digits-resnet", preprocessing)
    with pytest.raises(ValueError, match="expected the names of 10 classes, but got 2"):
        models.save(path, DigitsResNet(), "cafe:digits-resnet", preprocessing, ["a", "b"])
    assert not path.exists()


def test_plain_weights_in_float16_are_read_and_classes_counted(tmp_path: Path) -> None:
    model = DigitsResNet(num_classes=6)
    path = weights_file(tmp_path / "weights.safetensors", model, blocks__0__bn1__num_batches_tracked=None)
    loaded = models.load("cafe:digits-resnet", weights=path)
    assert loaded.num_classes == 6 and loaded.trained and loaded.classes is None
    expected = model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-6)
    with pytest.raises(
        ValueError,
        match=r"plain weights.*; name the architecture \(.*\) as the model, and give the file as `weights`",
    ):
        models.load(path)


def test_weights_must_match_exactly(tmp_path: Path) -> None:
    path = weights_file(
        tmp_path / "weights.safetensors",
        DigitsResNet(),
        fc__bias=None,
        extra=torch.zeros(2),
        stem__0__weight=torch.zeros(4, 3, 3, 3),
    )
    with pytest.raises(ValueError) as caught:
        models.load("cafe:digits-resnet", weights=path, num_classes=7)
    text = str(caught.value)
    assert (
        "are not those of cafe:digits-resnet: 1 missing: `fc.bias`; 1 unexpected: `extra`; 2 of another shape: " in text
    )
    assert "`stem.0.weight` (4, 3, 3, 3) instead of (16, 3, 3, 3), `fc.weight` (10, 128) instead of (7, 128)" in text
    other = weights_file(tmp_path / "other.safetensors", models.build("torchvision:mobilenet_v3_small", 10))
    with pytest.raises(
        ValueError, match=r"\d+ missing: `stem.0.weight`, `stem.1.weight`, `stem.1.bias`, …; \d+ unexpected"
    ):
        models.load("cafe:digits-resnet", weights=other)


def test_damaged_weights_are_refused_and_an_overflow_of_float16_is_told(tmp_path: Path) -> None:
    nan = torch.full((10,), float("nan"))
    path = weights_file(tmp_path / "weights.safetensors", DigitsResNet(), fc__bias=nan)
    with pytest.raises(ValueError, match=r"`fc.bias` has NaN or infinite values; the weights are damaged"):
        models.load("cafe:digits-resnet", weights=path)
    variances = torch.ones(16, dtype=torch.float16)
    variances[3] = torch.inf
    path = weights_file(tmp_path / "weights.safetensors", DigitsResNet(), stem__1__running_var=variances)
    with pytest.warns(
        UserWarning, match="1 of 16 values of `stem.1.running_var` were too large for the file's float16"
    ):
        loaded = models.load("cafe:digits-resnet", weights=path)
    assert loaded.model.get_buffer("stem.1.running_var")[2:5].tolist() == [1, 65504, 1]


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.ckpt", "model.pth.tar"])
def test_state_dicts_that_torch_saved_are_read(tmp_path: Path, name: str) -> None:
    model = DigitsResNet(num_classes=7)
    torch.save(model.state_dict(), tmp_path / name)
    loaded = models.load("cafe:digits-resnet", weights=tmp_path / name)
    assert loaded.num_classes == 7
    assert all(torch.equal(t, loaded.model.state_dict()[n]) for n, t in model.state_dict().items())
    with pytest.raises(ValueError, match=r"plain weights.*name the architecture \(timm:NAME, torchvision:NAME, "):
        models.load(str(tmp_path / name))


def wrapped(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


CHECKPOINTS = {
    "data-parallel": lambda tensors: wrapped(tensors, "module."),
    "training script": lambda tensors: {"state_dict": wrapped(tensors, "module."), "epoch": 3, "loss": torch.ones(())},
    "lightning": lambda tensors: {"state_dict": wrapped(tensors, "model."), "optimizer_states": [{}], "epoch": 3},
    "compiled": lambda tensors: {"model": wrapped(tensors, "_orig_mod."), "args": Namespace(lr=0.1)},
    "compiled in ddp": lambda tensors: {"model_state_dict": wrapped(tensors, "module._orig_mod.")},
    "numbers of numpy": lambda tensors: {"state_dict": tensors, "best": np.float64(0.9), "epoch": np.int64(3)},
    "averaged alone": lambda tensors: {"ema": {"state_dict": tensors}, "decay": 0.999},
    "with extra state": lambda tensors: {**tensors, "version": 3},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_of_training_scripts_are_read(tmp_path: Path, kind: str) -> None:
    model = DigitsResNet()
    torch.save(CHECKPOINTS[kind](dict(model.state_dict())), tmp_path / "last.ckpt")
    loaded = models.load("cafe:digits-resnet", weights=tmp_path / "last.ckpt").model
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_averaged_weights_are_preferred_and_it_is_said(tmp_path: Path) -> None:
    plain, averaged = DigitsResNet(), DigitsResNet()
    path = tmp_path / "last.pth.tar"
    torch.save({"state_dict": plain.state_dict(), "state_dict_ema": averaged.state_dict()}, path)
    with pytest.warns(UserWarning, match="the weights of `state_dict_ema` are used, not those of `state_dict`"):
        loaded = models.load("cafe:digits-resnet", weights=path).model
    assert torch.equal(loaded.get_parameter("fc.weight"), averaged.fc.weight)


def test_a_prefix_is_only_taken_off_where_all_names_have_it(tmp_path: Path) -> None:
    tensors = wrapped(DigitsResNet().state_dict(), "module.") | {"loss.weight": torch.ones(2)}
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"52 missing: `stem.0.weight`.*unexpected: `loss.weight`, `module.blocks"):
        models.load("cafe:digits-resnet", weights=tmp_path / "w.pth")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_no_state_dict_is_refused_with_advice_that_harms_nothing(tmp_path: Path) -> None:
    path, new = tmp_path / "net.pt", tmp_path / "net-weights.pth"
    torch.save(DigitsResNet(), path)
    new.write_bytes(b"mine")
    free = tmp_path / "net-weights1.pth"
    with pytest.raises(
        ValueError, match=rf"holds a cafe_tta.*DigitsResNet: a whole model.*execute code.*{free}"
    ) as error:
        models.load("cafe:digits-resnet", weights=path)
    line = str(error.value).split("imported: ")[1].split(", or loaded")[0]
    exec(line, {"torch": torch})  # what the text says to do works
    assert models.load("cafe:digits-resnet", weights=free).num_classes == 10 and new.read_bytes() == b"mine"

    torch.jit.script(DigitsResNet()).save(path)
    with pytest.raises(ValueError, match=r"is a TorchScript archive, not a state dict; .*torch.jit.load"):
        models.load("cafe:digits-resnet", weights=path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(
        ValueError, match="holds epoch, but no weights; expected a state dict, or one under state_dict_ema"
    ):
        models.load("cafe:digits-resnet", weights=path)
    torch.save([torch.ones(3)], path)
    with pytest.raises(ValueError, match="holds a list; expected a state dict"):
        models.load("cafe:digits-resnet", weights=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a whole file that torch.save wrote"):
        models.load("cafe:digits-resnet", weights=path)
    with pytest.raises(FileNotFoundError, match=r"no file at .*missing.pth"):
        models.load("cafe:digits-resnet", weights=tmp_path / "missing.pth")


def test_an_old_torch_reads_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(DigitsResNet().state_dict(), tmp_path / "w.pth")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.5.1"))
    with pytest.raises(ValueError, match="this torch, 2.5.1, can be made to execute code.*upgrade to torch 2.6"):
        models.load("cafe:digits-resnet", weights=tmp_path / "w.pth")


# Models of the user's own code

NETS = """
import torch
from torch import nn
from cafe_tta.models import Preprocessing

def build(num_classes=3):
    torch.manual_seed(0)
    head = nn.Linear(4, num_classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

class Net(nn.Module):
    preprocessing = Preprocessing(28, (0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    classes = ("cat", "dog", "owl")
    def __init__(self):
        super().__init__()
        self.body = build()
    def forward(self, images):
        return self.body(images)

trained = Net()
number = 3
def fails():
    raise KeyError("no such file")
def text(pretrained=False):
    return "text"
"""
STATED = {"size": 28, "mean": HALF, "std": HALF}


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of the user's, which is the current one."""
    (tmp_path / "own_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    yield tmp_path
    sys.modules.pop("own_nets", None)


@pytest.mark.parametrize("spec", ["own_nets:Net", "own_nets:trained", "own_nets.py:Net"])
def test_a_module_of_the_user_by_name(nets: Path, spec: str) -> None:
    loaded = models.load(spec)
    assert (loaded.architecture, loaded.num_classes, loaded.trained) == (spec, 3, True)
    assert loaded.preprocessing == Preprocessing(28, (0.1, 0.2, 0.3), HALF) and not loaded.model.training
    assert loaded.model(torch.zeros(2, 3, 28, 28)).shape == (2, 3)


def test_a_function_that_makes_a_module_with_weights_of_any_kind(nets: Path) -> None:
    model = models.build("own_nets:build", num_classes=5)
    torch.nn.init.ones_(model[4].weight)
    torch.save({"state_dict": wrapped(model.state_dict(), "module.")}, nets / "w.pth")
    loaded = models.load("own_nets:build", weights=nets / "w.pth", **STATED)
    assert loaded.num_classes == 5 and loaded.model.state_dict()["4.weight"].eq(1).all()  # from the file
    assert loaded.preprocessing == Preprocessing(28, HALF, HALF)
    with pytest.raises(
        ValueError, match=r"own_nets:build does not say what its images must look like; give `image_size`"
    ):
        models.load("own_nets:build", size=28)


def test_no_file_makes_us_execute_code(nets: Path) -> None:
    models.save("own.safetensors", models.build("own_nets:build", 4), "own_nets:build", Preprocessing(28, HALF, HALF))
    with pytest.raises(
        ValueError, match="holds the weights of own_nets:build, your own code, which no file makes us exec"
    ):
        models.load("own.safetensors")
    loaded = models.load("own_nets:build", weights="own.safetensors")
    assert (loaded.num_classes, loaded.preprocessing.size) == (4, 28)


def test_errors_of_own_modules(nets: Path) -> None:
    for spec, text in {
        "own_nets:Nett": "own_nets has no 'Nett'; did you mean 'Net'",
        "own_nets:number": r"own_nets:number\(\) failed: TypeError",
        "own_nets:fails": r"own_nets:fails\(\) failed: KeyError: 'no such file'",
        "own_netz:build": "no model 'own_netz:build'.*package.module:function for an nn.Module of your own",
        "tim:resnet26": "did you mean 'timm:resnet26'",
        "absent.py:Net": "no model 'absent.py:Net'",
    }.items():
        with pytest.raises(ValueError, match=text):
            models.load(spec)
    with pytest.raises(TypeError, match="expected own_nets:text to be an nn.Module, or to return one, but got str"):
        models.load("own_nets:text", pretrained=True)
    with pytest.raises(ValueError, match="own_nets:Net has 3 classes, but 5 are wanted; let it take `num_classes`"):
        models.load("own_nets:Net", num_classes=5)
    with pytest.raises(ValueError, match="own_nets:Net takes no `pretrained`"):
        models.load("own_nets:Net", pretrained=True)
    (nets / "broken.py").write_text("import no_such_library")
    with pytest.raises(ImportError, match="importing broken failed: No module named 'no_such_library'"):
        models.load("broken:Net")


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file at .*model.safetensors; expected a safetensors file"):
        models.load(tmp_path / "model.safetensors")
    path = tmp_path / "text.safetensors"
    path.write_bytes(b"not tensors at all")
    with pytest.raises(storage.StorageError, match="is not a whole safetensors file"):
        models.load(path)
    exported = tmp_path / "net.onnx"
    exported.write_bytes(b"anything")
    wanted = r"for PyTorch, but got an exported model, .*net.onnx, which cannot learn; give the weights"
    with pytest.raises(ValueError, match=wanted):
        models.load(exported)
    with pytest.raises(ValueError, match=wanted):
        models.load("torchvision:resnet18", weights=exported)
    storage.write(path, "source-stats", 1, {"mean": torch.zeros(2)}, {})
    with pytest.raises(storage.StorageError, match="expected a model file, but it holds 'source-stats'"):
        models.load(path)


def test_pretrained_models_know_the_names_of_their_classes() -> None:
    for spec, first in {"timm:resnet26": "tench, Tinca tinca", "torchvision:resnet18": "tench"}.items():
        model = models.build(spec)
        names = stated_classes(spec, model, pretrained=True)
        assert names is not None and (len(names), names[0]) == (1000, first)
        assert stated_classes(spec, model, pretrained=False) is None
        assert stated_classes(spec, models.build(spec, 10), pretrained=True) is None


def test_an_own_module_may_name_its_classes(nets: Path) -> None:
    assert models.load("own_nets:Net").classes == ("cat", "dog", "owl")
    (nets / "names.txt").write_text("chat\nchien\nhibou\n")
    assert models.load("own_nets:Net", classes="names.txt").classes == ("chat", "chien", "hibou")


# The digits network


def test_the_digits_network_has_128_features_and_checks_its_options() -> None:
    classifier = split_classifier(DigitsResNet())
    assert (classifier.feature_layer, classifier.num_features, classifier.num_classes) == ("fc", 128, 10)
    with pytest.raises(ValueError, match="expected `num_classes` and `width` to be at least 1, but got 10 and 0"):
        DigitsResNet(width=0)


def test_the_digits_network_learns_digits() -> None:
    digits = load_digits()
    grey = (digits.images * (255 / 16)).astype(np.uint8)
    images = models.load("cafe:digits-resnet").preprocessing(np.repeat(grey[..., None], 3, axis=3))
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    seen, held_out = order[:1000], order[1000:]
    torch.manual_seed(0)
    classifier = split_classifier(DigitsResNet())
    config = TrainConfig(epochs=6, swag_epochs=0, augment="crop")
    assert train(classifier, images[seen], labels[seen], config).train_accuracy > 0.97
    with torch.no_grad():
        assert (classifier(images[held_out]).argmax(1) == labels[held_out]).float().mean() > 0.95


def test_a_new_head_keeps_the_rest_of_the_weights(tmp_path: Path) -> None:
    old = models.build("cafe:digits-resnet", num_classes=10)
    file = tmp_path / "old.safetensors"
    models.save(file, old, "cafe:digits-resnet", Preprocessing(size=32, mean=HALF, std=HALF), tuple("abcdefghij"))
    loaded = models.load("cafe:digits-resnet", weights=file, num_classes=7, new_head=True)
    assert (loaded.num_classes, loaded.classes) == (7, None)
    tensors, kept = loaded.model.state_dict(), old.state_dict()
    head = [name for name in tensors if tensors[name].dim() and len(tensors[name]) == 7]
    assert head and all(torch.equal(tensors[n], kept[n]) for n in tensors if n not in head and "num_batches" not in n)
    with pytest.raises(ValueError, match="`new_head` with `weights`"):
        models.load("cafe:digits-resnet", num_classes=7, new_head=True)
    with pytest.raises(ValueError, match="10 classes apart, but `num_classes` is 7"):
        models.load("cafe:digits-resnet", weights=file, num_classes=7)


# Options


def test_the_options_describe_a_classifier(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    models.save(file, DigitsResNet(), "cafe:digits-resnet", Preprocessing(32, HALF, HALF), tuple("abcdefghij"))
    options = models.ModelOptions(file, mean=(0.1, 0.2, 0.3), image_size=28, head="fc", device="cpu")
    model = models.load_classifier(options)
    assert (model.architecture, model.classes) == ("cafe:digits-resnet", tuple("abcdefghij"))
    assert model.preprocessing == Preprocessing(28, (0.1, 0.2, 0.3), HALF)
    assert not model.classifier.training and model.classifier.feature_layer == "fc"
    assert model.classifier.backbone.get_parameter("model.stem.0.weight").is_contiguous(
        memory_format=torch.channels_last
    )


def test_options_that_make_no_sense_are_refused_with_their_names() -> None:
    with pytest.raises(ValueError, match="cafe:digits-resnet alone has random weights; give a file as `weights`$"):
        models.load_classifier(models.ModelOptions("cafe:digits-resnet"))
    with pytest.raises(ValueError, match="timm:resnet26 alone has .* as `weights`, or set `pretrained`"):
        models.load_classifier(models.ModelOptions("timm:resnet26", num_classes=2))
    assert models.load_classifier(models.ModelOptions("cafe:digits-resnet"), untrained=True).classes is None
    with pytest.raises(ValueError, match="expected `image_size` to be at least 1"):
        models.ModelOptions("cafe:digits-resnet", image_size=0)
    with pytest.raises(ValueError, match=r"unknown device 'cdua'; did you mean 'cuda'\?; choose from: auto, cpu"):
        models.choose_device("cdua")


def test_an_option_of_load_is_passed_on_by_its_name() -> None:
    """Adding an option takes its declaration in `ModelOptions` and its use in `load`, and nothing else."""
    accepted = inspect.signature(models.load).parameters
    own = {"model", "image_size", "head", "device"}
    assert {described.name for described in describe(models.ModelOptions)} - own <= accepted.keys()
