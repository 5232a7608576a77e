"""Code of the user's own on the command line: models, methods, corruptions, protocols and data sets."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from cafe_tta import METHODS, bench, checks, copies, data, models, plugins
from cafe_tta.bench import PROTOCOLS
from cafe_tta.bench.provenance import file_digest
from cafe_tta.cli import app
from cafe_tta.corruptions import CORRUPTIONS, corrupt, corruption_name
from cafe_tta.models.classes import read_classes
from cafe_tta.models.digits_resnet import DigitsResNet

runner = CliRunner()
NETS = """
from torch import nn
from cafe_tta.corruptions import CORRUPTIONS, corrupt, corruption_name
from cafe_tta.models.classes import read_classes
from cafe_tta.models.digits_resnet import DigitsResNet

class Net(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.net = DigitsResNet(num_classes, width=4)
    def forward(self, images):
        return {"logits": self.net(images), "loss": None}
"""
OWN = ("--model", "own_code:Net", "--weights", "last.ckpt")
PIXELS = ("--image-size", 32, "--mean", "0.3,0.3,0.3", "--std", "0.35,0.35,0.35")


def run(*args, code=0):
    result = runner.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    if code == 2:
        assert re.fullmatch(r"error: .+\n", result.stderr), result.stderr
    return result


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module of the user's and a checkpoint of its model."""
    (tmp_path / "own_code.py").write_text(NETS)
    torch.manual_seed(0)
    tensors = {f"module.net.{name}": tensor for name, tensor in DigitsResNet(10, width=4).state_dict().items()}
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "last.ckpt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    yield tmp_path
    sys.modules.pop("own_code", None)


def test_an_own_model_with_its_checkpoint_on_every_command(folder):
    run("stats", *OWN, *PIXELS, "--data", "digits:train", "--limit", 256, "--output", "stats.safetensors")
    adapt = ("adapt", *OWN, "--data", "digits:test", "--source", "stats.safetensors", "--measure", 0)
    run(*adapt, "--output", "out")
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["model"], summary["images"]) == ("own_code:Net", 896)
    checked = run("serve", *OWN, "--source", "stats.safetensors", "--check").stdout
    assert "own_code:Net" in checked and "all is well" in checked
    bench = (
        "bench",
        "mixed",
        *OWN,
        *PIXELS,
        "--methods",
        "source",
        "--seeds",
        1,
        "--limit",
        64,
        "--corruptions",
        "fog",
    )
    run(*bench, "--output", "results", "--no-frechet")
    record = json.loads(Path("results/records.jsonl").read_text().splitlines()[0])
    assert record["model"]["architecture"] == "own_code:Net" and record["model"]["num_classes"] == 10
    train = ("train", "--model", "own_code:Net", *PIXELS, "--num-classes", 10, "--data", "digits:train")
    run(*train, "--output", "trained", "--epochs", 1, "--swag-epochs", 0)
    loaded = models.load("own_code:Net", weights="trained/model.safetensors")
    assert loaded.classes == tuple("0123456789") and loaded.preprocessing.size == 32


def test_an_own_model_must_say_what_its_images_look_like(folder):
    said = run("stats", *OWN, "--data", "digits:train", "--output", "s.safetensors", code=2).stderr
    assert "own_code:Net does not say what its images must look like; give `image_size`, `mean` and `std`" in said


# Names of classes, and single files


def predicted(output):
    with open(output / "predictions.csv") as file:
        return {row["file"]: row["class"] for row in csv.DictReader(file)}


def test_names_of_classes_come_from_a_file_or_from_class_folders(folder):
    animals = [f"animal {i}" for i in range(10)]
    Path("names.txt").write_text("\n".join(animals) + "\n")
    Path("by_name.json").write_text(json.dumps({name: i for i, name in enumerate(animals)}))
    digits = data.load("digits:test")
    for i in range(30):
        for path in (f"photos/{i}.png", f"sorted/animal {digits.labels[i]}/{i}.png"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digits.images([i])[0]).save(path)
    Path("photos/phone.heic").write_bytes(b"x")
    adapt = ("adapt", *OWN, *PIXELS, "--method", "adabn", "--measure", 0)
    run(*adapt, "--data", "photos", "--output", "numbers")
    numbers = predicted(folder / "numbers")
    assert set(numbers.values()) <= set("0123456789") and len(numbers) == 30
    assert "phone.heic,HEIC files cannot be read" in Path("numbers/unreadable.csv").read_text()
    assert json.loads(Path("numbers/summary.json").read_text())["unreadable"] == 1
    for number, names in enumerate(("names.txt", "by_name.json")):
        run(*adapt, "--data", "photos", "--output", f"named{number}", "--classes", names)
        assert predicted(folder / f"named{number}") == {file: f"animal {label}" for file, label in numbers.items()}
    run(*adapt, "--data", "sorted", "--output", "folders")
    assert set(predicted(folder / "folders").values()) <= set(animals)
    run(*adapt, "--data", "photos/7.png", "--output", "one")
    assert list(predicted(folder / "one")) == ["7.png"]
    run(*adapt, "--data", "photos/1*.png", "--output", "some", "--limit", 3)
    assert list(predicted(folder / "some")) == ["1.png", "10.png", "11.png"]
    Path("names.txt").write_text("\n".join(animals[:9]))
    said = run(*adapt, "--data", "photos", "--output", "x", "--classes", "names.txt", code=2).stderr
    assert "names.txt names 9 classes, but the model tells 10 apart" in said


@pytest.mark.parametrize(
    ("name", "text", "classes"),
    [
        ("c.txt", "cat\ndog\n\n", ("cat", "dog")),
        ("c.json", '["cat", "dog"]', ("cat", "dog")),
        ("c.json", '{"1": "dog", "0": "cat"}', ("cat", "dog")),
        ("c.json", '{"dog": 1, "cat": 0}', ("cat", "dog")),
        ("c.json", '{"0": ["n02123045", "cat"], "1": ["n02084071", "dog"]}', ("cat", "dog")),
        ("c.txt", "cat\n\ndog", "expected a name for every class, but line 2 is empty"),
        ("c.txt", "", "expected a name for every class"),
        ("c.json", '{"0": "cat", "2": "dog"}', "its numbers are not 0 to 1, each once"),
        ("c.json", '{"cat": 0', "or a JSON object like"),
        ("c.json", "[1, 2]", "its names are not texts"),
        ("c.json", "3", "it is a int"),
    ],
)
def test_files_of_names(tmp_path, name, text, classes):
    (tmp_path / name).write_text(text)
    if isinstance(classes, tuple):
        assert read_classes(tmp_path / name) == classes
    else:
        with pytest.raises(ValueError, match=classes):
            read_classes(tmp_path / name)


# Methods, corruptions, protocols and data sets

EXAMPLE = Path(__file__).parent.parent.parent / "examples/own_method.py"


@pytest.fixture
def registries(folder):
    """Whatever a test adds to the registries is gone after it."""
    known = (METHODS, CORRUPTIONS, PROTOCOLS, bench.DATASETS, data.DATASETS, plugins._KEYS)
    before = [dict(registry) for registry in known]
    yield folder
    for registry, kept in zip(known, before, strict=True):
        registry.clear()
        registry.update(kept)
    for name in ("own_method", "mine", "soft"):
        sys.modules.pop(name, None)


def records(output):
    return [json.loads(line) for line in (Path(output) / "records.jsonl").read_text().splitlines()]


def test_the_example_of_an_own_method_and_corruption(registries, checked_model):
    few = ("--seeds", 1, "--limit", 64, "--no-frechet", "--model", checked_model)
    said = run("bench", "mixed", "--methods", f"tent,{EXAMPLE}:Sharpen(margin=0.3,lr=0.01),{EXAMPLE}:Sharpen", *few,
               "--corruptions", f"fog,{EXAMPLE}:sand", "--severity", "3-4", "--output", "results")  # fmt: skip
    made = records("results")
    assert [record["label"] for record in made] == ["tent", "sharpen(margin=0.3,lr=0.01)", "sharpen"]
    assert {record["method"] for record in made} == {"tent", "sharpen"} and made[1]["config"]["margin"] == 0.3
    assert made[0]["corruptions"]["names"] == ["fog", "sand"] and made[0]["corruptions"]["severities"] == [3, 4]
    assert set(made[0]["episode"]["domains"]) == {"fog-3", "fog-4", "sand-3", "sand-4"}
    assert made[2]["steps"] > 0 and "sharpen" in said.stdout and "no preset" not in said.stderr
    run("report", "results")  # also where nobody knows the method: in another process
    assert "sharpen" in Path("results/report/tables.tex").read_text()

    run("bench", "mixed", "--methods", f"{EXAMPLE}:Sharpen", "--set", "sharpen.lr=0.5", *few, "--corruptions", "fog",
        "--protocols", f"{EXAMPLE}:class_by_class", "--data", f"{EXAMPLE}:odd_digits", "--source-data", "digits:train",
        "--output", "sorted")  # fmt: skip
    (record,) = records("sorted")
    assert (record["protocol"], record["dataset"], record["copies"]) == ("class_by_class", "odd_digits", 1)
    assert (record["config"]["lr"], record["episode"]["images"], record["data"]["images"]) == (0.5, 64, 452)
    run("adapt", "--model", checked_model, "--method", f"{EXAMPLE}:Sharpen", "--data", f"{EXAMPLE}:odd_digits",
        "--set", "margin=0.2", "--output", "out", "--measure", 0)  # fmt: skip
    assert json.loads(Path("out/summary.json").read_text())["options"]["margin"] == 0.2
    assert "Predictions whose entropy is above" in run("methods", f"{EXAMPLE}:Sharpen").stdout


def test_numbers_of_a_method_that_was_changed_since_are_not_taken_for_its_own(registries, checked_model):
    mine = Path("mine.py")
    mine.write_text(EXAMPLE.read_text())
    bench = ("bench", "mixed", "--methods", "tent,mine.py:Sharpen", "--seeds", 1, "--limit", 64, "--no-frechet",
             "--model", checked_model, "--corruptions", "fog", "--output", "results")  # fmt: skip
    run(*bench)
    assert "2 of 2 runs are done already" in run(*bench).stderr
    mine.write_text(EXAMPLE.read_text() + "\n# another loss\n")
    file_digest.cache_clear()  # a new process
    said = run(*bench, code=2).stderr
    assert "(sharpen, seed 0) was recorded before the file of sharpen was changed; choose another folder" in said
    assert len(records("results")) == 2 and "method" not in records("results")[0]["code"]


def test_a_method_with_options_of_its_own_inherits_presets(registries, checked_model):
    Path("soft.py").write_text(
        "from dataclasses import dataclass\nimport cafe_tta as cafe\n\n"
        "@dataclass(frozen=True)\nclass SoftConfig(cafe.TentConfig):\n    temperature: float = 0.5\n\n"
        "class Soft(cafe.Tent):\n    name = 'soft'\n    Config = SoftConfig\n"
    )
    run("bench", "mixed", "--methods", "soft.py:Soft", "--seeds", 1, "--limit", 64, "--no-frechet", "--model",
        checked_model, "--corruptions", "fog", "--dataset", "cifar10", "--data", "digits:test", "--source-data",
        "digits:train", "--output", "results")  # fmt: skip
    (record,) = records("results")
    assert record["config"]["temperature"] == 0.5 and record["config"]["lr"] == METHODS["tent"].presets["cifar"].lr


@pytest.fixture
def checked_model(registries):
    """A digits model that the commands of one test share."""
    path = registries / "model.safetensors"
    torch.manual_seed(0)
    half = (0.5, 0.5, 0.5)
    models.save(path, DigitsResNet(10, 16), "cafe:digits-resnet", models.Preprocessing(32, half, half))
    return path


def test_the_example_passes_the_contract(registries, source):
    sharpen = plugins.load_object(f"{EXAMPLE}:Sharpen")
    for check in checks.ALL:
        check(lambda: sharpen(source.classifier), source.corrupted)


def test_an_own_corruption_is_the_same_for_every_process_and_batch(registries, tmp_path):
    images = data.load("digits:test").images(range(8))
    whole = corrupt(images, f"{EXAMPLE}:sand", severity=5, seed=3)
    assert whole.dtype == np.uint8 and 0.05 < (whole != images).any(-1).mean() < 0.3
    assert np.array_equal(corrupt(images[5:6], "sand", severity=5, seed=3, indices=[5])[0], whole[5])
    run("corrupt", "--data", "digits:test", "--corruptions", f"fog,{EXAMPLE}:sand", "--severity", 5, "--seed", 3,
        "--output", "copies", "--no-contact-sheet")  # fmt: skip
    assert np.array_equal(np.load("copies/sand.npy")[:8], whole)
    job = copies.plan(data.load("digits:test"), "more", copies.CopyOptions(corruptions=f"{EXAMPLE}:sand"))
    *_, texts = copies.run._arguments(job)  # of a worker process, which must find it by itself
    plugins._KEYS.clear()
    del CORRUPTIONS["sand"]
    assert [corruption_name(text) for text in texts] == ["sand"]


def test_a_corruption_in_a_published_layout_is_read(registries, checked_model):
    digits = data.load("digits:test")
    images, rows = digits.images(range(40)), np.tile(digits.labels[:40], 5)
    Path("tree").mkdir()
    np.save("tree/labels.npy", rows)
    for name in ("fog", "sand"):
        np.save(f"tree/{name}.npy", np.concatenate([np.full_like(images, 40 * s) for s in range(5)]))
    assert data.load("cifar10-c@tree").corruptions() == ("fog", "sand")
    assert data.load("cifar10-c:sand-5@tree").images([0]).max() == 160
    run("bench", "separated", "--data", "cifar10-c@tree", "--source-data", "digits:train", "--model", checked_model,
        "--corruptions", "sand", "--methods", "source", "--seeds", 1, "--no-frechet", "--severity", 2,
        "--output", "results")  # fmt: skip
    (record,) = records("results")
    assert record["by_domain"].keys() == {"sand-2"} and record["dataset"] == "cifar10-c"
    for level in "15":
        for name in ("fog", "dust"):
            Path(f"net/{name}/{level}/n1").mkdir(parents=True)
            Image.new("RGB", (8, 8), (int(level), 0, 0)).save(f"net/{name}/{level}/n1/1.png")
    assert data.load("imagenet-c@net").corruptions() == ("fog", "dust")
    assert data.load("imagenet-c:dust-5@net").images([0])[0, 0, 0].tolist() == [5, 0, 0]


PACKAGE = """
import numpy as np
import cafe_tta as cafe
from cafe_tta import data
from cafe_tta.bench.experiments import Dataset
from cafe_tta.bench.protocols import clean

class Quiet(cafe.Adapter):
    '''Answers as the source model does.'''
    adapts = False
    def answer(self, images):
        return self.predict(images), cafe.Report(len(images), stepped=False, reason="it never does")

def dim(image, severity, random):
    return (image // (1 + severity)).astype(np.uint8)

def blank(rest):
    return data.ArraySet("blank", np.zeros((int(rest or 3), 32, 32, 3), np.uint8), np.arange(int(rest or 3)))

roads = Dataset("roads", "digits:test", "digits:train", "model.safetensors", ("clean",), preset="roads", num_groups=4)
broken = 3
"""


def test_installed_packages_offer_methods_corruptions_protocols_and_data_sets(registries, checked_model):
    Path("own_package.py").write_text(PACKAGE)
    Path("own_package-1.dist-info").mkdir()
    Path("own_package-1.dist-info/METADATA").write_text("Name: own-package\nVersion: 1\n")
    Path("own_package-1.dist-info/entry_points.txt").write_text(
        "[cafe_tta.methods]\nquiet = own_package:Quiet\nbad = own_package:broken\ngone = own_package:gone\n"
        "[cafe_tta.corruptions]\ndim = own_package:dim\n[cafe_tta.protocols]\nstill = own_package:clean\n"
        "[cafe_tta.datasets]\nblank = own_package:blank\nroads = own_package:roads\n"
    )
    sys.path.insert(0, str(registries))
    assert len(data.load("blank:7")) == 7 and len(data.load("blank")) == 3
    said = run("bench", "table1", "--dataset", "roads", "--methods", "quiet,source", "--seeds", 1, "--limit", 40,
               "--output", "results", "--no-frechet")  # fmt: skip
    quiet, source = records("results")
    assert quiet["accuracy"] == source["accuracy"] and quiet["dataset"] == "roads" and quiet["protocol"] == "clean"
    assert "note: quiet has no preset 'roads': its default options are used" in said.stderr
    more = ("bench", "mixed", "--methods", "quiet", "--corruptions", "dim", "--model", checked_model, "--seeds", 1)
    protocols = ("--protocols", "still", "--protocols", "all-mixed")
    run(*more, *protocols, "--limit", 40, "--output", "more", "--no-frechet")
    assert [(record["protocol"], *record["by_domain"]) for record in records("more")] == [
        ("still", "clean"),
        ("all-mixed", "dim-5"),
    ]
    assert "expected bad to be a method, a subclass of cafe_tta.Adapter" in run("methods", "bad", code=2).stderr
    assert "gone, of own-package, cannot be loaded: AttributeError" in run("methods", "gone", code=2).stderr
    listed = run("methods")
    assert "Answers as the source model does" in listed.stdout and "note: gone, of own-package, cannot" in listed.stderr
    assert "quiet" in run("bench", "mixed", "--methods", "quite", code=2).stderr


def test_errors_of_own_code(registries):
    small = ("--seeds", 1, "--limit", 10)
    for options, text in {
        ("--methods", "tnet", "--set", "lr=0.1"): "unknown method 'tnet'; did you mean 'tent'?; choose from: source, ",
        ("--set", "tnet.lr=0.1"): "unknown method 'tnet'; did you mean 'tent'?",
        ("--set", "lrr=0.1"): "no method has an option 'lrr'",
        ("--methods", f"{EXAMPLE}:sand"): "expected sand to be a method, a subclass of cafe_tta.Adapter",
        ("--methods", f"{EXAMPLE}:Sharpen(mragin=1)"): "has no option 'mragin'; did you mean 'margin'?",
        ("--methods", f"{EXAMPLE}:Sharpened"): "has no 'Sharpened'; did you mean 'Sharpen'?",
        ("--methods", "nowhere.py:Sharpen"): "unknown method 'nowhere.py:Sharpen'; choose from",
        ("--corruptions", "sand"): "unknown corruption 'sand'",
        ("--corruptions", f"{EXAMPLE}:Sharpen"): "a function of (image, severity, random)",
        ("--protocols", "all-mxied"): "unknown protocol 'all-mxied'; did you mean 'all-mixed'?",
        ("--protocols", "own_code:Net"): "expected Net to be a Protocol or a function that returns episodes",
        ("--severity", "6"): "numbers from 1 to 5",
        ("--dataset", "roads"): "unknown data set 'roads'; choose from: digits, ",
        ("--dataset", "digit"): "unknown data set 'digit'; did you mean 'digits'?",
        ("--data", "digits:test"): "images of your own need `data`, `source_data` and `model`, but `source_data` and",
        ("--data", "own_code:Net", "--source-data", "x", "--model", "y"): "expected own_code:Net to be an image set",
    }.items():
        assert text in run("bench", "mixed", *small, *options, code=2).stderr, options


def test_a_failed_attempt_does_not_block_the_corrected_one(registries, checked_model):
    Path("tree").mkdir()
    np.save("tree/labels.npy", np.tile(np.arange(10), 5))
    np.save("tree/fog.npy", np.zeros((50, 32, 32, 3), np.uint8))
    command = ("bench", "mixed", "--seeds", 1, "--limit", 40, "--source-limit", 200, "--output", "results")
    on_tree = ("--dataset", "digits", "--data", "cifar10-c@tree", "--methods", "cafe", "--model", checked_model)
    assert "has no corruption 'brightness'" in run(*command, *on_tree, code=2).stderr  # before anything is computed
    assert not Path("results/settings.json").exists()
    other = checked_model.with_name("other.safetensors")
    half = models.Preprocessing(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    models.save(other, DigitsResNet(10, 16), "cafe:digits-resnet", half)
    failing = (*command, "--methods", "cafe,bacs", "--model", other, "--severity", 3)
    assert "expected a SWAG posterior" in runner.invoke(app, [*map(str, failing)]).stderr
    assert Path("results/settings.json").exists()
    Path("results/records.jsonl").unlink(missing_ok=True)
    run(*command, "--methods", "cafe", "--model", checked_model, "--severity", 4, "--corruptions", "fog")
    assert len(records("results")) == 1
    run(*command, "--methods", "cafe", "--model", checked_model, "--severity", 4, "--corruptions", "fog")
    again = (*command, "--methods", "cafe", "--model", checked_model, "--severity", 3, "--corruptions", "fog")
    assert "belongs to other settings" in run(*again, code=2).stderr


def test_own_images_of_different_sizes_are_brought_to_the_size_of_the_model(registries, checked_model):
    digits = data.load("digits:test")
    for i in range(40):
        for folder, size in (("mixed", (32 + i % 3, 40)), ("equal", (32, 32))):
            path = Path(f"{folder}/{digits.labels[i]}/{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(digits.images([i])[0]).resize((32 + i % 3, 40))
            picture.resize(size, Image.Resampling.BILINEAR).save(path)
    said = {}
    for folder in ("mixed", "equal"):
        own = ("--dataset", "mine", "--data", folder, "--source-data", folder, "--model", checked_model)
        said[folder] = run("bench", "mixed", *own, "--methods", "cafe", "--corruptions", "contrast", "--seeds", 1,
                           "--num-groups", 2, "--output", f"out-{folder}").stderr  # fmt: skip
    note = "note: the images differ in size; they are read at 32 px, bilinear, then corrupted"
    assert note in said["mixed"] and note not in said["equal"]
    mixed, equal = records("out-mixed")[0], records("out-equal")[0]
    assert (mixed["hits"], mixed["frechet_after"]) == (equal["hits"], equal["frechet_after"])


def test_own_labels_are_matched_by_name(registries):
    """A model whose classes have another order than the folders: the accuracy is the same."""
    digits, half = data.load("digits:test"), (0.5, 0.5, 0.5)
    torch.manual_seed(0)
    model = DigitsResNet(10)
    order = list(reversed(range(10)))
    turned = DigitsResNet(10)
    turned.load_state_dict({n: t[order] if n.startswith("fc.") else t for n, t in model.state_dict().items()})
    for name, net, names in (("a", model, range(10)), ("b", turned, order)):
        classes = [f"class {i}" for i in names]
        models.save(f"{name}.safetensors", net, "cafe:digits-resnet", models.Preprocessing(32, half, half), classes)
    for i in range(50):
        Path(f"own/class {digits.labels[i]}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images([i])[0]).save(f"own/class {digits.labels[i]}/{i}.png")
    for name in "ab":
        run("bench", "same", "--dataset", "mine", "--data", "own", "--source-data", "own", "--methods", "source",
            "--model", f"{name}.safetensors", "--seeds", 1, "--no-frechet", "--output", name)  # fmt: skip
    (first,), (second,) = records("a"), records("b")
    assert first["accuracy"] == second["accuracy"] and first["dataset"] == "mine" and first["episode"]["images"] == 50
    Path("own/strange").mkdir()
    Image.new("RGB", (32, 32)).save("own/strange/1.png")
    said = run("bench", "same", "--dataset", "mine", "--data", "own", "--source-data", "own", "--methods", "source",
               "--model", "a.safetensors", "--seeds", 1, "--no-frechet", "--output", "c", code=2)  # fmt: skip
    assert "has classes that the model does not have: strange" in said.stderr
