"""The Python blocks of the README and of the pages that show adapters run as they are printed."""

import re
from pathlib import Path

import pytest
import torch

from cafe_tta import models

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run_blocks(page: Path) -> dict:
    """The names that the blocks of a page leave behind, which share what a reader has: a model, loaders, a stream."""
    torch.manual_seed(0)
    names = {
        "model": models.build("cafe:digits-resnet", num_classes=10).eval(),
        "source_loader": [torch.randn(64, 3, 32, 32) for _ in range(6)],
        "stream": [torch.randn(64, 3, 32, 32) / 3 + 0.5 for _ in range(2)],  # unlike the source
        "steps": [],
    }
    before = {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), names)
        names["steps"].append(names["adapter"].counters.steps if "adapter" in names else None)
    assert all(torch.equal(before[name], tensor) for name, tensor in names["model"].state_dict().items())
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_six_lines_adapt(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(ROOT / page)
    assert names["logits"].shape == (64, 10) and names["steps"] == [2]


def test_python_blocks_of_the_page_on_adapters_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(ROOT / "docs/adapters.md")
    assert names["steps"] == [None, 2, 0]  # the state was saved after the reset
    assert names["logits"].shape == (64, 10) and type(names["plain"]) is type(names["model"])


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README.read_text()))
def test_links_of_the_readme_lead_somewhere(path):
    assert path.startswith("http") or (README.parent / path).exists()


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_results_that_are_repeated_are_those_of_the_measurements(page):
    """Percentages with two digits after the point: each stands in docs/unmix.md, beside its command."""
    measured = (ROOT / "docs/unmix.md").read_text()
    numbers = re.findall(r"\b\d\d\.\d\d\b(?: ± \d\.\d\d)?", (ROOT / page).read_text())
    assert numbers and not [number for number in numbers if number not in measured]
