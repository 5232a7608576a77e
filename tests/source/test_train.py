"""Training of the source classifier: schedule, SWAG, resuming, and what is refused."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cafe_tta import storage
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.data import load as load_images
from cafe_tta.models import ModelOptions, load, load_classifier
from cafe_tta.models.cifar_cnn import CifarCNN
from cafe_tta.source.recipes import RECIPES, recipe
from cafe_tta.source.swag import SwagCollector
from cafe_tta.source.train import NEWER, Progress, TrainConfig, TrainResult, augmented, collect_swag, train
from cafe_tta.source.train_folder import TrainingRun

CONFIG = TrainConfig(epochs=3, batch_size=16, lr=0.05, swag_epochs=3, swag_lr=0.02, collections_per_epoch=2)


class Interrupted(Exception):
    pass


def network(seed: int = 0, classes: int = 3) -> SplitClassifier:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        return split_classifier(nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(32, classes)))


def toy_data(count: int = 70) -> tuple[Tensor, Tensor]:
    """Images whose class is the channel that is bright."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 3, (count,), generator=generator)
    images = torch.randn(count, 3, 10, 10, generator=generator) * 0.5
    images[torch.arange(count), labels] += 1.0
    return images, labels


def everything(classifier: SplitClassifier, result: TrainResult) -> dict[str, Tensor]:
    tensors = dict(classifier.state_dict())
    if result.posterior is not None:
        (member,) = result.posterior.members
        tensors |= {f"mean.{name}": tensor for name, tensor in member.mean.items()}
        tensors |= {f"variance.{name}": tensor for name, tensor in member.variance.items()}
    return tensors


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_the_defaults_are_the_papers() -> None:
    config = TrainConfig()
    assert (config.epochs, config.batch_size, config.lr, config.momentum, config.weight_decay) == (
        200,
        128,
        0.1,
        0.9,
        5e-4,
    )
    assert (config.swag_epochs, config.swag_lr, config.collections_per_epoch) == (100, 0.01, 4)


def test_learning_rate_follows_the_cosine_then_stays() -> None:
    images, labels = toy_data()
    seen: list[float] = []
    original = torch.optim.SGD.step

    def step(optimizer: torch.optim.SGD, closure: None = None) -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        original(optimizer, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        train(network(), images, labels, CONFIG)
    steps = math.ceil(70 / 16)
    falling = [0.05 / 2 * (1 + math.cos(math.pi * number / (3 * steps))) for number in range(3 * steps)]
    assert seen == pytest.approx(falling + [0.02] * (3 * steps))


def test_it_learns_and_the_source_model_is_the_mean_of_what_was_collected() -> None:
    images, labels = toy_data()
    classifier = network()
    snapshots: list[dict[str, Tensor]] = []
    original = SwagCollector.collect

    def collect(collector: SwagCollector, now: SplitClassifier) -> None:
        snapshots.append({name: p.detach().double().clone() for name, p in now.named_parameters()})
        original(collector, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwagCollector, "collect", collect)
        result = train(classifier, images, labels, replace(CONFIG, epochs=8))
    assert len(snapshots) == 3 * 2
    for name, parameter in classifier.named_parameters():
        mean = torch.stack([snapshot[name] for snapshot in snapshots]).mean(0)
        torch.testing.assert_close(parameter.double(), mean, rtol=1e-6, atol=1e-8)
        assert result.posterior is not None and torch.equal(result.posterior.members[0].mean[name], parameter)
    assert not classifier.training
    assert len(result.losses) == len(result.accuracies) == 11
    assert result.losses[-1] < result.losses[0]
    assert result.train_accuracy > 0.95
    with torch.no_grad():
        assert result.train_accuracy == pytest.approx((classifier(images).argmax(1) == labels).float().mean().item())


def test_batchnorm_statistics_are_those_of_the_training_images() -> None:
    images, labels = toy_data()
    classifier = network()
    train(classifier, images, labels, replace(CONFIG, batch_size=70, collections_per_epoch=1))
    convolution, norm = classifier.get_submodule("backbone.model.0"), classifier.get_submodule("backbone.model.1")
    with torch.no_grad():  # one batch of all images, without augmentation
        hidden = convolution(images)
    torch.testing.assert_close(norm.running_mean, hidden.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, hidden.var((0, 2, 3)))


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path: Path, stop: int) -> None:
    images, labels = toy_data()
    whole = network()
    expected = everything(whole, train(whole, images, labels, CONFIG))

    def interrupt(progress: Progress) -> None:
        if progress.epoch == stop:
            raise Interrupted

    path = tmp_path / "training.safetensors"
    with pytest.raises(Interrupted):
        train(network(), images, labels, CONFIG, path, interrupt)
    torch.manual_seed(stop)  # the caller's random numbers do not matter
    resumed = network(seed=9)
    seen: list[Progress] = []
    result = train(resumed, images, labels, CONFIG, path, seen.append)
    assert [progress.epoch for progress in seen] == list(range(stop + 1, 7))
    assert len(result.losses) == 6
    assert_same(everything(resumed, result), expected)

    again = network(seed=10)  # a finished run is not run again
    assert_same(everything(again, train(again, images, labels, CONFIG, path, interrupt)), expected)


def test_the_callers_random_numbers_go_on_as_before() -> None:
    images, labels = toy_data()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(network(), images, labels, replace(CONFIG, epochs=1, swag_epochs=0))
    assert torch.equal(torch.rand(3), expected)


def test_seeds_differ() -> None:
    images, labels = toy_data()
    results = []
    for seed in (0, 0, 1):
        classifier = network()
        train(classifier, images, labels, replace(CONFIG, epochs=1, swag_epochs=0, seed=seed))
        results.append(classifier.head.weight)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_a_checkpoint_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    images, labels = toy_data()
    path = tmp_path / "training.safetensors"
    config = replace(CONFIG, epochs=1, swag_epochs=0)
    train(network(), images, labels, config, path)
    content = path.read_bytes()
    classifier = network()
    before = classifier.fingerprint()
    with pytest.raises(
        ValueError, match=r"another training run: lr=0.05 there, 0.1 here; seed=0 there, 4 here; give the same"
    ):
        train(classifier, images, labels, replace(config, lr=0.1, seed=4), path)
    with pytest.raises(ValueError, match="another training run: other images; give"):
        train(classifier, images + 1, labels, config, path)
    with pytest.raises(ValueError, match="another training run: other labels; give"):
        train(classifier, images, labels.roll(1), config, path)
    with pytest.raises(ValueError, match="another training run: 70 images there, 60 here"):
        train(classifier, images[:60], labels[:60], config, path)
    with pytest.raises(ValueError, match=r"another classifier: `head.bias` has shape \(3,\) there, \(4,\) here"):
        train(network(classes=4), images, labels, config, path)
    assert classifier.fingerprint() == before
    assert path.read_bytes() == content
    with pytest.raises(FileNotFoundError, match="does not exist; create it first"):
        train(classifier, images, labels, config, tmp_path / "nowhere" / "training.safetensors")


@pytest.mark.parametrize("lr", [1e30, 3e38])
def test_training_that_diverges_stops_and_leaves_the_checkpoint(tmp_path: Path, lr: float) -> None:
    images, labels = toy_data()
    path = tmp_path / "training.safetensors"
    contents: list[bytes] = []
    config = replace(CONFIG, epochs=0, swag_epochs=9, swag_lr=lr, collections_per_epoch=1)

    def keep(progress: Progress) -> None:
        contents.append(path.read_bytes())

    linear = split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(300, 8), nn.ReLU(), nn.Linear(8, 3)))
    text = rf"the loss became (nan|inf) in epoch 1 at learning rate {lr:g}; lower `swag_lr`".replace("+", r"\+")
    with pytest.raises(RuntimeError, match=text):
        train(linear, images, labels, config, path, keep)
    assert not path.exists()
    with (
        pytest.raises(RuntimeError, match="the weights became NaN or infinite in epoch 1 at"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(TrainConfig, "learning_rate", lambda self, epoch: math.inf)
        train(network(), images, labels, replace(config, batch_size=100), path, keep)
    assert not path.exists()
    with pytest.raises(RuntimeError, match="in epoch 2 at learning rate"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainConfig, "learning_rate", lambda self, epoch: 0.01 if epoch < 1 else lr)
        train(network(), images, labels, config, path, keep)
    assert len(contents) == 1 and path.read_bytes() == contents[0]


def test_plain_training_has_no_posterior() -> None:
    images, labels = toy_data()
    seen: list[Progress] = []
    result = train(network(), images, labels, replace(CONFIG, swag_epochs=0), progress=seen.append)
    assert result.posterior is None
    assert [(p.epoch, p.total_epochs, p.phase) for p in seen] == [(1, 3, "train"), (2, 3, "train"), (3, 3, "train")]
    assert [p.loss for p in seen] == list(result.losses)


def test_frozen_parameters_stay() -> None:
    images, labels = toy_data()
    classifier = network()
    classifier.head.requires_grad_(False)
    before = classifier.head.weight.clone()
    train(classifier, images, labels, replace(CONFIG, swag_epochs=0))
    assert torch.equal(classifier.head.weight, before)
    with pytest.raises(ValueError, match="nothing to train"):
        train(classifier.requires_grad_(False), images, labels, CONFIG)


def test_swag_can_be_collected_around_trained_weights(tmp_path: Path) -> None:
    images, labels = toy_data()
    classifier = network()
    before = classifier.head.weight.clone()
    seen: list[Progress] = []
    posterior = collect_swag(
        classifier, images, labels, epochs=2, batch_size=16, checkpoint=tmp_path / "swag", progress=seen.append
    )
    assert [(p.phase, p.lr) for p in seen] == [("swag", 1e-4)] * 2
    (member,) = posterior.members
    assert torch.equal(member.mean["head.weight"], classifier.head.weight)
    assert 0 < (classifier.head.weight - before).abs().max() < 1e-2
    assert max(variance.max().item() for variance in member.variance.values()) > 0
    with pytest.raises(ValueError, match="expected `epochs` to be at least 1, but got 0"):
        collect_swag(classifier, images, labels, epochs=0)


def test_crops_move_images_and_repeat_their_border() -> None:
    height, width = 12, 11
    grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")).float()
    images = torch.cat([grid, torch.zeros(1, height, width)]).repeat(300, 1, 1, 1)
    torch.manual_seed(0)
    moved = augmented(images, "crop")
    seen = set()
    for image in moved:
        top, left = int(image[0, 5, 5]) - 5, int(image[1, 5, 5]) - 5
        seen.add((top, left))
        rows = (torch.arange(height) + top).clamp(0, height - 1)
        cols = (torch.arange(width) + left).clamp(0, width - 1)
        assert torch.equal(image[:2], grid[:, rows][:, :, cols])
    assert {top for top, _ in seen} == {left for _, left in seen} == set(range(-4, 5))
    least = augmented(images, "crop", 1)
    assert set((least[:, 0, 5, 5] - 5).tolist()) == {-1, 0, 1}
    assert augmented(images, "none") is images
    flips = (augmented(images, "crop-flip")[:, 1].diff(dim=-1).sum((1, 2)) < 0).float().mean()
    assert 0.4 < flips < 0.6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": -1}, "expected `epochs` to be at least 0, but got -1"),
        ({"batch_size": 0}, "expected `batch_size` to be at least 1, but got 0"),
        ({"lr": float("nan")}, "expected `lr` to be at least 0, but got nan"),
        ({"swag_lr": math.inf}, "expected `swag_lr` to be at least 0 and finite, but got inf"),
        ({"momentum": 1.0}, "expected `momentum` to be at least 0 and below 1, but got 1.0"),
        ({"augment": "flip"}, "expected `augment` to be one of 'crop-flip', 'crop', 'none', but got 'flip'"),
        ({"swag_epochs": 1, "collections_per_epoch": 1}, "expected at least 2 collections for SWAG, but got 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrainConfig(**options)  # type: ignore[arg-type]


def test_bad_data_are_refused() -> None:
    images, labels = toy_data()
    classifier = network()
    with pytest.raises(TypeError, match="expected a SplitClassifier, but got Linear"):
        train(nn.Linear(2, 2), images, labels, CONFIG)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected tensors, but got list and Tensor"):
        train(classifier, images.tolist(), labels, CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"normalised images.*but got torch.uint8 of shape \(70, 3, 10, 10\)"):
        train(classifier, images.byte(), labels, CONFIG)
    with pytest.raises(ValueError, match=r"int64 labels of shape \(70,\).*but got torch.int64 of shape \(69,\)"):
        train(classifier, images, labels[1:], CONFIG)
    with pytest.raises(ValueError, match="expected labels from 0 to 2, but they go from 0 to 3"):
        train(classifier, images, labels.clone().index_fill_(0, torch.tensor([4]), 3), CONFIG)
    with pytest.raises(ValueError, match="expected finite images, but some of 0 to 69 have NaN"):
        train(classifier, images.clone().index_fill_(0, torch.tensor([4]), float("nan")), labels, CONFIG)
    with pytest.raises(ValueError, match="an epoch of 1 steps cannot collect weights 2 times"):
        train(classifier, images, labels, replace(CONFIG, batch_size=100))


# A run and its folder


def test_a_run_from_python_continues_and_knows_when_it_is_finished(tmp_path: Path) -> None:
    config = TrainConfig(epochs=2, swag_epochs=0, batch_size=256, augment="crop")
    options = ModelOptions("cafe:digits-resnet", mean=(0.5, 0.5, 0.5), device="cpu")
    whole = TrainingRun("digits:test", tmp_path / "whole", options, config, test="digits:test")
    report = whole.train()
    assert report["images"] == 896 and report["test_accuracy"] == pytest.approx(report["train_accuracy"])

    @contextmanager
    def interrupting(description: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(amount: int) -> None:
            if description == "training" and amount:
                raise Interrupted

        yield advance

    cut = replace(whole, output=tmp_path / "cut")
    with pytest.raises(Interrupted):
        cut.train(progress=interrupting)
    assert cut.epochs_done == 1 and cut.finished() is None
    cut.train()
    first, second = (run.output / "model.safetensors" for run in (whole, cut))
    assert first.read_bytes() == second.read_bytes() and not cut.checkpoint.exists()
    finished = whole.finished()
    assert finished == report
    text = whole.report.read_text().replace('"mean": "0.5,0.5,0.5"', '"mean": "0.50,.5,0.5"')  # as a user wrote it
    whole.report.write_text(text)
    assert whole.finished() is not None
    with pytest.raises(
        ValueError, match=r"other settings: lr=0.1 there, 0.2 here; choose another `output`, or clear it"
    ):
        replace(whole, config=replace(config, lr=0.2)).finished()
    whole.clear()
    assert list(whole.output.iterdir()) == []


def test_a_run_without_labels_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((3, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match="expected labelled images, but arrays:.* has no class folders and no labels"):
        TrainingRun(f"arrays:{tmp_path}", tmp_path / "model").train()


# Recipes


def test_every_recipe_builds_a_network_with_at_least_256_features() -> None:
    for name, made in RECIPES.items():
        model = load_classifier(made.model, untrained=True)
        assert model.classifier.num_features >= 256, name
        batchnorm = any(isinstance(layer, nn.BatchNorm2d) for layer in model.classifier.modules())
        assert batchnorm == ("groupnorm" not in name)
        assert model.preprocessing.size == 32, name
    with pytest.raises(ValueError, match=r"unknown recipe 'cifar1O'; did you mean .*'cifar10'.*choose from: cifar10,"):
        recipe("cifar1O")


def test_the_first_layer_of_the_quick_network_whitens_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(50, 3, 32, 32, generator=generator).cumsum(3) / 5  # neighbours are alike
    network = CifarCNN()
    network.see_source(images)
    patches = network.whitening(images).transpose(0, 1).reshape(24, -1).detach()
    covariance = torch.cov(patches[:12])
    assert torch.allclose(covariance, torch.eye(12), atol=0.1)
    assert torch.equal(patches[12:], -patches[:12])
    assert not network.whitening.weight.requires_grad and network.whitening.bias.requires_grad


def test_blocks_of_the_quick_network_begin_near_the_identity() -> None:
    block = CifarCNN().blocks[1]
    activations = torch.rand(2, 64, 8, 8)
    assert torch.allclose(block.conv1(activations)[:, :64], activations, atol=1e-6)


def test_smoothing_nesterov_and_warmup_reach_the_step() -> None:
    """Two steps of one batch, against the formulas."""
    images, labels = toy_data(8)
    config = TrainConfig(
        epochs=2, warmup=1, batch_size=8, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0, label_smoothing=0.2,
        swag_epochs=0, augment="none",
    )  # fmt: skip
    classifier = network()
    classifier.backbone.model[5].p = 0.0  # dropout
    twin = copy.deepcopy(classifier).train()
    train(classifier, images, labels, config)
    velocity = [torch.zeros_like(p) for p in twin.parameters()]
    for lr in (0.0, 0.1):  # one step an epoch: at its start
        targets = 0.8 * nn.functional.one_hot(labels, 3) + 0.2 / 3
        loss = -(targets * twin(images).log_softmax(1)).sum(1).mean()
        for p, v, g in zip(
            twin.parameters(), velocity, torch.autograd.grad(loss, list(twin.parameters())), strict=True
        ):
            v.mul_(0.9).add_(g)
            p.data -= lr * (g + 0.9 * v)
    for a, b in zip(classifier.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_rates_of_biases_and_head_and_their_decay() -> None:
    """Two steps against the formulas: a rate of its own, and the same decay for all."""
    images, labels = toy_data(8)
    config = TrainConfig(
        epochs=2, batch_size=8, lr=0.1, momentum=0.0, weight_decay=0.01, swag_epochs=0, augment="none", bias_lr=4,
        head_lr=0.5,
    )  # fmt: skip
    classifier = network()
    classifier.backbone.model[5].p = 0.0  # dropout
    twin = copy.deepcopy(classifier).train()
    train(classifier, images, labels, config)
    rates = {"backbone.model.1.bias": 4.0, "head.weight": 0.5}
    assert rates.keys() <= dict(twin.named_parameters()).keys()
    for lr in (0.1, 0.05):  # one step an epoch, along the cosine
        gradients = torch.autograd.grad(nn.functional.cross_entropy(twin(images), labels), list(twin.parameters()))
        for (name, p), gradient in zip(twin.named_parameters(), gradients, strict=True):
            p.data -= lr * rates.get(name, 1.0) * gradient + lr * 0.01 * p.data
    for a, b in zip(classifier.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_alternate_flips_show_both_views_in_two_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = toy_data(40)
    images += torch.arange(10.0)  # brighter to the right
    seen: list[dict[int, bool]] = []

    def spy(batch: Tensor, *options: Any) -> Tensor:
        made = augmented(batch, *options)
        found = (batch.flatten(1)[:, None] == images.flatten(1)).all(-1).int().argmax(1).tolist()
        seen.append({i: bool((view[..., -1] < view[..., 0]).all()) for i, view in zip(found, made, strict=True)})
        return made

    monkeypatch.setattr("cafe_tta.source.train.augmented", spy)
    config = TrainConfig(epochs=4, batch_size=40, swag_epochs=0, lr=0.01, crop=1, alternate_flips=True)
    train(network(), images, labels, config)
    first, second, third, fourth = seen
    assert first == third and second == fourth
    assert second == {i: not mirrored for i, mirrored in first.items()}
    assert 10 < sum(first.values()) < 30


def test_bfloat16_is_of_the_products_alone(tmp_path: Path) -> None:
    images, labels = toy_data(32)
    config = TrainConfig(epochs=2, swag_epochs=0, batch_size=8, lr=0.05, augment="none", precision="bfloat16")
    exact, rounded = network(), network()
    seen = set()
    rounded.backbone.model[0].register_forward_hook(lambda _, __, out: seen.add((out.dtype, rounded.training)))
    a = train(exact, images, labels, replace(config, precision="float32"))
    b = train(rounded, images, labels, config, tmp_path / "run.safetensors")
    assert seen == {(torch.bfloat16, True), (torch.float32, False)}  # in training; for BatchNorm and afterwards
    assert all(p.dtype == torch.float32 for p in rounded.parameters())
    assert b.losses != a.losses and np.allclose(b.losses, a.losses, rtol=0.02)
    with pytest.raises(ValueError, match=r"another training run: .*precision"):
        train(network(), images, labels, replace(config, precision="float32"), tmp_path / "run.safetensors")


def test_warmup_and_nesterov_are_checked() -> None:
    with pytest.raises(ValueError, match=r"expected `warmup` to be below `epochs` \(3\), but got 3"):
        TrainConfig(epochs=3, warmup=3)
    with pytest.raises(ValueError, match="expected `momentum` to be above 0 with `nesterov`, but got 0"):
        TrainConfig(momentum=0, nesterov=True)


def test_a_checkpoint_without_the_newer_options_goes_on(tmp_path: Path) -> None:
    images, labels = toy_data()
    path = tmp_path / "checkpoint.safetensors"

    def interrupt(report: Progress) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        train(network(), images, labels, CONFIG, path, interrupt)
    tensors, meta = storage.read(path, "training", 1)
    meta["config"] = {name: value for name, value in meta["config"].items() if name not in NEWER}
    storage.write(path, "training", 1, tensors, meta)
    resumed, whole = network(), network()
    assert_same(
        everything(resumed, train(resumed, images, labels, CONFIG, path)),
        everything(whole, train(whole, images, labels, CONFIG)),
    )


def test_the_model_file_knows_how_it_was_trained(tmp_path: Path) -> None:
    config = TrainConfig(epochs=1, swag_epochs=0, batch_size=256, augment="crop")
    run = TrainingRun("digits:test", tmp_path, config=config, test="digits:test", recipe="mine")
    report = run.train()
    training = load(tmp_path / "model.safetensors").training
    assert training is not None
    assert training["settings"]["recipe"] == "mine" and training["settings"]["epochs"] == 1
    assert training["data"] == load_images("digits:test").digest()
    assert training["test_accuracy"] == report["test_accuracy"] and training["images"] == 896


def test_no_epochs_recompute_batchnorm_and_nothing_else(tmp_path: Path) -> None:
    images, labels = toy_data()
    classifier = network()
    before = {name: value.clone() for name, value in classifier.named_parameters()}
    none = TrainConfig(epochs=0, swag_epochs=0, batch_size=100)
    result = train(classifier, images, labels, none)
    assert result.losses == () and result.posterior is None
    assert all(torch.equal(value, before[name]) for name, value in classifier.named_parameters())
    convolution, norm = classifier.backbone.model[:2]
    with torch.no_grad():
        activations = convolution(images)
    assert torch.allclose(norm.running_mean, activations.mean((0, 2, 3)), atol=1e-5)
    with pytest.raises(ValueError, match="cafe:cifar-cnn alone has random weights"):
        TrainingRun("digits:test", tmp_path, ModelOptions("cafe:cifar-cnn", image_size=32), none).train()


def test_a_layer_that_is_computed_from_images_is_left_alone_where_there_are_weights(tmp_path: Path) -> None:
    torch.save(CifarCNN().state_dict(), tmp_path / "weights.pth")
    options = ModelOptions("cafe:cifar-cnn", weights=tmp_path / "weights.pth", image_size=32)
    none = TrainConfig(epochs=0, swag_epochs=0, batch_size=128)
    TrainingRun("digits:test", tmp_path / "made", options, none).train()
    made = load(tmp_path / "made" / "model.safetensors").model
    there = torch.load(tmp_path / "weights.pth")
    assert torch.equal(made.whitening.weight, there["whitening.weight"])  # type: ignore[union-attr,arg-type]
