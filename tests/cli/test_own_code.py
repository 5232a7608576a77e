"""Code of the user's own on the command line: models, methods, corruptions, protocols and data sets."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cafe_tta import models
from cafe_tta.cli import app
from cafe_tta.models.digits_resnet import DigitsResNet

runner = CliRunner()
NETS = """
from torch import nn
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
