"""Code of the user's own on the command line: models, methods, corruptions, protocols and data sets."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from cafe_tta import data, models
from cafe_tta.cli import app
from cafe_tta.models.classes import read_classes
from cafe_tta.models.digits_resnet import DigitsResNet

runner = CliRunner()
NETS = """
from torch import nn
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
    adapt = ("adapt", *OWN, *PIXELS, "--data", "digits:test", "--source", "stats.safetensors", "--measure", 0)
    run(*adapt, "--output", "out")
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["model"], summary["images"]) == ("own_code:Net", 896)
    checked = run("serve", *OWN, *PIXELS, "--source", "stats.safetensors", "--check").stdout
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
