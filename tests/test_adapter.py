"""What adapters do beyond the contract that `checks` tests: options, errors, state files, reports."""

import copy
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from torch import nn

import cafe_tta as cafe


def test_registry_has_the_methods_of_the_paper_and_more():
    assert set(cafe.METHODS) >= {
        "source", "adabn", "tent", "t3a", "bacs", "fr", "infomax", "cafe", "cafe-dimwise", "cafe-no-infomax", "dann",
        "cafe-plus",  # our own
    }  # fmt: skip
    for name, kind in cafe.METHODS.items():
        assert kind.name == name
        assert {"cifar", "imagenet"} <= set(kind.presets)
        assert all(isinstance(preset, kind.Config) for preset in kind.presets.values())
        assert kind.__doc__


@pytest.mark.parametrize(
    ("name", "preset", "expected"),
    [
        ("adabn", "cifar", {"batch_size": 32}),
        ("t3a", "imagenet", {"batch_size": 32, "support_size": 20}),
        ("tent", "cifar", {"batch_size": 128, "lr": 1e-3, "momentum": 0.8, "optimizer": "sgd"}),
        ("tent", "imagenet", {"batch_size": 64, "lr": 2.5e-4, "momentum": 0.8}),
        ("bacs", "cifar", {"batch_size": 128, "lr": 1e-3, "momentum": 0.8, "prior_weight": 1e-4}),
        ("bacs", "imagenet", {"batch_size": 64, "lr": 1e-4, "momentum": 0.9, "prior_weight": 3e-4}),
        ("fr", "cifar", {"batch_size": 256, "lr": 1e-3, "momentum": 0.9, "temperature": 0.01}),
        ("fr", "cifar-online", {"temperature": 0.05}),
        ("infomax", "cifar", {"batch_size": 256, "lr": 1e-3, "momentum": 0.8}),
        ("cafe", "cifar", {"batch_size": 256, "lr": 1e-3, "momentum": 0.8, "samples_per_dim": 1.25, "min_samples": 0}),
        ("cafe", "imagenet-online", {"batch_size": 256, "lr": 1e-3, "answer": "after-eval"}),
        ("dann", "cifar", {"batch_size": 128, "lr": 1e-3, "momentum": 0.8, "iterations": 400, "hidden": 1024}),
        ("dann", "imagenet", {"batch_size": 64, "lr": 1e-3, "momentum": 0.8, "iterations": 20_000}),
        (
            "eta",
            "imagenet",
            {"batch_size": 64, "lr": 2.5e-4, "momentum": 0.9, "max_entropy": 0.4, "max_similarity": 0.05},
        ),
        ("eta", "cifar100", {"batch_size": 200, "lr": 1e-3, "optimizer": "adam", "max_similarity": 0.1}),
        ("eata", "cifar", {"batch_size": 200, "lr": 1e-3, "optimizer": "adam", "max_similarity": 0.4, "penalty": 1.0}),
        ("eata", "imagenet", {"penalty": 2000.0, "margin": 0.4, "parameters": "norm"}),
        ("rdumb", "imagenet", {"reset_every": 1000, "max_similarity": 0.05, "lr": 2.5e-4}),
        ("sar", "imagenet", {"lr": 2.5e-4, "radius": 0.05, "reset_below": 0.2, "max_entropy": 0.4, "momentum": 0.9}),
        ("sar", "imagenet-vit", {"lr": 1e-3, "skip_last_stage": True, "quirks": "repaired"}),
        ("deyo", "imagenet", {"lr": 2.5e-4, "max_entropy": 0.5, "margin": 0.4, "min_drop": 0.2, "destroy": "patches"}),
        ("deyo", "imagenet-separated", {"min_drop": 0.3}),
        ("roid", "cifar", {"batch_size": 200, "lr": 1e-3, "optimizer": "adam", "keep": 0.99}),
        ("roid", "imagenet", {"batch_size": 64, "lr": 2.5e-4, "momentum": 0.9, "nesterov": True}),
        ("cmf", "imagenet", {"source_share": 0.01, "keep": 0.99, "noise": 0.005, "nesterov": True}),
        ("cotta", "cifar", {"lr": 1e-3, "optimizer": "adam", "keep": 0.999, "restore": 0.01, "min_confidence": 0.92}),
        (
            "cotta",
            "imagenet",
            {"lr": 0.01, "nesterov": True, "restore": 0.001, "min_confidence": 0.1, "symmetric": True},
        ),
        ("rotta", "imagenet", {"lr": 1e-3, "optimizer": "adam", "capacity": 64, "slow": 0.05, "keep": 0.999}),
        ("unmix-tns", "imagenet-mixed", {"batch_size": 16, "components": 128}),
        ("zerosiam", "imagenet-vit", {"lr": 5e-3, "predictor_lr": 5e-3, "tie": 1.0}),
        ("lame", "imagenet", {"affinity": "rbf", "neighbours": 5, "weight": 1.0}),
        ("ttac", "cifar", {"lr": 0.01, "batch_size": 256, "scale": 0.05, "min_images": 16, "answer": "after-eval"}),
        ("ttac", "imagenet", {"lr": 1e-3, "batch_size": 128, "class_scale": 0.05, "window": 1280, "class_window": 64}),
        ("actmad", "imagenet", {"lr": 2.5e-4, "nesterov": True, "weight_decay": 5e-4, "normalisation": "source"}),
        ("moetta", "imagenet", {"experts": 9, "lr": 1e-3, "momentum": 0.9, "balance": 0.2, "margin": 0.4}),
    ],
)
def test_presets_are_the_papers(name, preset, expected):
    config = cafe.METHODS[name].presets[preset]
    assert {key: getattr(config, key) for key in expected} == expected


def test_typos_are_answered_with_suggestions(source):
    with pytest.raises(ValueError, match=r"unknown method 'cafee'; did you mean 'cafe'\?; choose from: source, adabn"):
        cafe.create("cafee", source.classifier)
    with pytest.raises(
        ValueError, match=r"tent has no option 'moment'; did you mean 'momentum'\?; options: batch_size"
    ):
        cafe.create("tent", source.classifier, moment=0.9)
    with pytest.raises(ValueError, match="tent has no preset 'cifar10'; choose from: cifar, "):
        cafe.create("tent", source.classifier, preset="cifar10")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tent", {"lr": -1}, "expected `lr` to be at least 0, but got -1"),
        ("tent", {"lr": float("inf")}, "expected `lr` to be at least 0 and finite, but got inf"),
        ("tent", {"momentum": 1.0}, "expected `momentum` to be at least 0 and below 1, but got 1.0"),
        (
            "tent",
            {"answer": "later"},
            "expected `answer` to be one of 'before', 'after', 'after-eval', but got 'later'",
        ),
        ("cafe", {"normalisation": "none"}, "expected `normalisation` to be one of 'batch', 'source', 'blend'"),
        ("cafe", {"eigenvalue_floor": 0}, "expected `eigenvalue_floor` to be above 0, but got 0"),
        ("cafe", {"min_samples": -1}, "expected `min_samples` to be at least 0, but got -1"),
        ("cafe", {"samples_per_dim": -1}, "expected `samples_per_dim` to be at least 0, but got -1"),
        ("t3a", {"support_size": 0}, "expected `support_size` to be at least 1 or None, but got 0"),
        ("bacs", {"ensemble_size": 3}, "expected `ensemble_size` to be at most 2, the posterior's, but got 3"),
        ("fr", {"temperature": 0.2}, r"one that the histograms were made with \(0.01, 0.05\), but got 0.2"),
        ("adabn", {"momentum": 2}, "expected `momentum` to be between 0 and 1 or None, but got 2"),
        ("infomax", {"batch_size": 0}, "expected `batch_size` to be at least 1, but got 0"),
    ],
)
def test_impossible_options_are_refused(source, name, options, message):
    with pytest.raises(ValueError, match=message):
        cafe.create(name, source.classifier, source.needs[cafe.METHODS[name].needs], **options)


@pytest.mark.parametrize("name", [name for name, kind in cafe.METHODS.items() if kind.needs])
def test_what_a_method_needs_is_asked_for(source, name):
    with pytest.raises(
        ValueError, match=f"{name} needs {cafe.METHODS[name].needs} from the source domain, but got none; "
    ):
        cafe.create(name, source.classifier)
    with pytest.raises(TypeError, match="needs"):
        cafe.create(name, source.classifier, 3)


def test_methods_that_need_nothing_ignore_the_source(source):
    cafe.create("tent", source.classifier, source.needs["stats"])(source.corrupted)


def test_config_of_another_method_is_refused(source):
    with pytest.raises(TypeError, match="expected a CAFeConfig, but got TentConfig"):
        cafe.CAFe(source.classifier, source.needs["stats"], cafe.TentConfig())


def test_model_must_be_split_first(source):
    with pytest.raises(TypeError, match="make one with cafe_tta.split_classifier"):
        cafe.Tent(nn.Linear(3, 2))


def test_adabn_needs_batchnorm(source_without_batchnorm):
    with pytest.raises(ValueError, match="adapts the statistics of BatchNorm layers, but this classifier has none"):
        cafe.create("adabn", source_without_batchnorm.classifier)


def test_state_of_another_adapter_is_refused_and_changes_nothing(source, tmp_path):
    stats = source.needs["stats"]
    adapter = cafe.create("cafe", source.classifier, stats)
    adapter(source.corrupted)
    adapter.save(tmp_path / "cafe.safetensors")
    other = cafe.create("infomax", source.classifier)
    with pytest.raises(ValueError, match="is a state of 'cafe', but this adapter is 'infomax'"):
        other.load(tmp_path / "cafe.safetensors")
    other = cafe.create("cafe", source.classifier, stats, lr=0.1)
    expected = other(source.corrupted)
    other.reset()
    with pytest.raises(ValueError, match="was saved with other options: lr=0.001 there, 0.1 here"):
        other.load(tmp_path / "cafe.safetensors")
    assert torch.equal(other(source.corrupted), expected)


def test_state_of_another_classifier_is_refused(source, make_network, tmp_path):
    adapter = cafe.create("tent", source.classifier)
    adapter.save(tmp_path / "state.safetensors")
    other = cafe.create("tent", cafe.split_classifier(make_network(seed=5)))
    with pytest.raises(ValueError, match=r"does not belong to this classifier: \d+ of \d+ tensors differ"):
        other.load(tmp_path / "state.safetensors")


def test_damaged_state_is_refused_and_changes_nothing(source, tmp_path):
    adapter = cafe.create("infomax", source.classifier)
    adapter(source.corrupted)
    path = tmp_path / "state.safetensors"
    adapter.save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    before = adapter.predict(source.corrupted)
    with pytest.raises(ValueError, match="is damaged: its content does not match its checksum"):
        adapter.load(path)
    assert torch.equal(adapter.predict(source.corrupted), before)


def test_state_goes_on_in_another_process(source, tmp_path):
    """Bit for bit: the other process only has the files."""
    stats = source.needs["stats"]
    adapter = cafe.create("cafe", source.classifier, stats)
    adapter(source.corrupted)
    adapter.save(tmp_path / "state.safetensors")
    stats.save(tmp_path / "stats.safetensors")
    torch.save(source.classifier, tmp_path / "classifier.pt")
    torch.save(source.corrupted, tmp_path / "images.pt")
    expected = adapter(source.corrupted)
    program = """
import sys, torch, cafe_tta as cafe
folder = sys.argv[1]
classifier = torch.load(f"{folder}/classifier.pt", weights_only=False)
adapter = cafe.CAFe(classifier, cafe.SourceStats.load(f"{folder}/stats.safetensors"))
adapter.load(f"{folder}/state.safetensors")
torch.save(adapter(torch.load(f"{folder}/images.pt")), f"{folder}/logits.pt")
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_a_state_dict_is_refused_because_it_is_not_the_whole_state(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"])
    adapter(source.images[:32])
    with pytest.raises(RuntimeError, match=r"but got a state dict, which lacks momentum .*copy\.deepcopy\(adapter\)"):
        cafe.create("cafe", source.classifier, source.needs["stats"]).load_state_dict(adapter.state_dict())


def test_refused_steps_are_reported(source):
    class Doubtful(cafe.Infomax):
        name = "doubtful"

        def loss(self, features, logits):
            return super().loss(features, logits) * float("nan")

    adapter = Doubtful(source.classifier)
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    with pytest.warns(cafe.StepRefused, match="doubtful took no step on this batch: its loss is nan"):
        logits = adapter(source.corrupted)
    assert torch.isfinite(logits).all()
    assert adapter.counters.refused == 1 and adapter.counters.steps == 0 and adapter.counters.batches == 1
    assert adapter.report.refused and not adapter.report.stepped
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter.state().items())


def test_gradients_that_are_not_finite_are_refused(source):
    class Steep(cafe.Infomax):
        name = "steep"

        def loss(self, features, logits):
            return (features - features.detach()).sqrt().sum()  # 0, with an infinite slope

    with pytest.warns(cafe.StepRefused, match="the norm of its gradient is (nan|inf)"):
        Steep(source.classifier)(source.corrupted)


def test_a_batch_with_labels_is_refused_with_the_cure(source):
    adapter = cafe.create("tent", source.classifier)
    with pytest.raises(TypeError, match="expected a tensor of images, but got tuple; pass the images alone"):
        adapter((source.images[:4], source.labels[:4]))


def test_one_bad_image_is_named(source):
    images = source.corrupted.clone()
    images[7, 0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match=re.escape("images [7] of the batch have NaN or infinite values")):
        cafe.create("source", source.classifier)(images)


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")
def test_classifier_that_cannot_read_the_images_is_the_callers_mistake(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"])
    with pytest.raises(ValueError, match=r"the classifier cannot read images of shape \(4, 5, 10, 10\): "):
        adapter(torch.zeros(4, 5, 10, 10))


def test_report_and_counters(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"])
    adapter(source.corrupted)
    adapter(source.corrupted[:1])
    assert adapter.counters.batches == 2 and adapter.counters.images == 49 and adapter.counters.steps == 1
    assert "min_batch=2" in adapter.report.reason
    adapter(source.corrupted)
    notes = adapter.report.notes
    assert adapter.report.loss == pytest.approx(notes["alignment"] + notes["infomax"], rel=1e-5)


def test_every_option_says_what_it_is():
    """Each field of a config has a default: `--set` and `create` can change one without naming the others."""
    for kind in cafe.METHODS.values():
        kind.Config()
        assert len({field.name for field in fields(kind.Config)}) == len(fields(kind.Config))


def test_import_is_light():
    program = """
import sys, cafe_tta
heavy = {"torchvision", "timm", "cv2", "matplotlib", "typer", "rich", "sklearn", "scipy", "PIL", "fastapi"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"import cafe_tta loads {done.stderr}"


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")
@pytest.mark.parametrize(("method", "options"), [("tent", {}), ("cafe-plus", {"gate": False})])
def test_group_norm_in_channels_last_format(method, options, make_network):
    """Where only the normalisation layers move, PyTorch's own backward pass would end the process here."""
    network, images, source_images = make_network(batchnorm=False).eval(), *torch.randn(2, 64, 3, 10, 10)
    answers = []
    for layout in (torch.contiguous_format, torch.channels_last):
        classifier = cafe.split_classifier(copy.deepcopy(network).to(memory_format=layout))
        source = cafe.FeatureStats.fit(classifier, [source_images]).group(1)
        adapter = cafe.create(method, classifier, source, lr=0.1, **options)
        adapter(images.to(memory_format=layout))
        assert adapter.report.stepped
        answers.append(adapter.predict(images))
        exported = adapter.export()
        assert not any(layer._forward_pre_hooks for layer in exported.modules())
        torch.testing.assert_close(exported(images), answers[-1])
    torch.testing.assert_close(*answers)


def test_fisher_information_of_group_norm_in_channels_last_format(make_network):
    network, images = make_network(batchnorm=False).eval(), torch.randn(64, 3, 10, 10)
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        classifier = cafe.split_classifier(copy.deepcopy(network).to(memory_format=layout))
        found.append(cafe.FisherInformation.fit(classifier, [images.to(memory_format=layout)]).fisher)
        assert not any(layer._forward_pre_hooks for layer in classifier.modules())
        assert all(parameter.requires_grad for parameter in classifier.parameters())
    torch.testing.assert_close(*found)
