"""The examples run as they are."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from cafe_tta.data import load as load_images
from cafe_tta.data.digits import load_digits

from .serve.http_server import Server, png, shared_files

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = json.loads((EXAMPLES / "digits.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run(script: str, *arguments: object, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_notebook_runs_and_its_claims_hold(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    names = {"__name__": "notebook"}
    for cell in CODE:
        exec(compile("".join(cell["source"]), "digits.ipynb", "exec"), names)
    means = {name: sum(column) / len(column) for name, column in names["table"].items()}
    assert means["cafe-plus"] > means["cafe"] + 5 > means["source"] + 10
    assert "CAFePlus True" in capsys.readouterr().out


def test_the_notebook_is_committed_with_outputs_of_modest_size():
    assert all(cell["outputs"] for cell in CODE[1:])
    assert (EXAMPLES / "digits.ipynb").stat().st_size < 200_000


def test_the_client_prints_a_line_for_each_file(tmp_path, tmp_path_factory):
    files = shared_files(tmp_path_factory)
    for number, pixels in enumerate(load_digits("test").images(range(3))):
        (tmp_path / f"{number}.png").write_bytes(png(pixels))
    with Server("--model", files.model, "--source", files.stats, "--name", "digits").until_ready() as server:
        said = run("client.py", server.url, "0.png", "1.png", "2.png", "--batch", 2, "--camera", "gate-1", cwd=tmp_path)
    lines = said.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["0.png", "1.png", "2.png"]
    assert lines[3] == "last answer by version 0 of the model; 0 is the source model"


def test_cifar10_comes_out_of_the_pictures_of_the_package(tmp_path):
    generator = np.random.default_rng(0)
    pictures = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
    pixels = {name: generator.integers(0, 256, (4, 1024, 3), dtype=np.uint8) for name in pictures}
    for name, lines in pixels.items():
        Image.fromarray(lines).save(tmp_path / name)
    (tmp_path / "train_lables.json").write_text(json.dumps([number % 10 for number in range(20)]))
    (tmp_path / "test_lables.json").write_text("[3, 1, 4, 1]")
    said = run("cifar10_from_npm.py", tmp_path, tmp_path / "data", cwd=tmp_path)
    assert said.splitlines()[0].endswith("cifar10_train: 20 images")
    train, test = (load_images(f"arrays:{tmp_path}/data/cifar10_{part}") for part in ("train", "test"))
    assert (train.images([17])[0, 2, 5] == pixels["data_batch_5.png"][1, 2 * 32 + 5]).all()
    assert list(test.labels) == [3, 1, 4, 1] and test.classes[3] == "cat"


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.iterdir() if path.name != "README.md"))
def test_every_example_is_in_the_list(script):
    assert f"({script})" in (EXAMPLES / "README.md").read_text() or script == "__pycache__"
