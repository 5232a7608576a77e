"""The README's Python blocks run as they are printed."""

import re
from pathlib import Path

import pytest
import torch

from cafe_tta import models

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_of_the_readme_run(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {
        "model": models.build("cafe:digits-resnet", num_classes=10).eval(),
        "source_loader": [torch.randn(64, 3, 32, 32) for _ in range(6)],
        "stream": [torch.randn(64, 3, 32, 32) / 3 + 0.5 for _ in range(2)],  # unlike the source
    }
    before = {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}
    for block in blocks[:2]:
        exec(compile(block, str(README), "exec"), names)
    assert names["logits"].shape == (64, 10) and names["adapter"].counters.steps == 2
    exec(compile(blocks[2], str(README), "exec"), names)
    assert names["adapter"].counters.steps == 0  # the state was saved after the reset
    assert all(torch.equal(before[name], tensor) for name, tensor in names["model"].state_dict().items())


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#]+)\)", README.read_text()))
def test_links_of_the_readme_lead_somewhere(path):
    assert path.startswith("http") or (README.parent / path).exists()
