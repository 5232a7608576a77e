"""Experiments, data sets and protocols are single values: complete, documented, and without logic about methods."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cafe_tta import METHODS
from cafe_tta.bench import DATASETS, EXPERIMENTS, PROTOCOLS, plan, report
from cafe_tta.bench.experiments import Dataset, parse_options
from cafe_tta.bench.records import RECORDS, read
from cafe_tta.bench.report.columns import main_columns
from cafe_tta.bench.report.figures import draw_frechet

from .report_records import record, save

ROOT = Path(__file__).parents[2]
COMMITTED = sorted(path.parent for path in (ROOT / "docs/results").rglob(RECORDS))


def test_every_name_stands_in_the_docs():
    text = (ROOT / "docs/benchmark.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row for name in EXPERIMENTS for row in rows if f"`cafe-tta bench {name} --dataset" in row] == rows[
        : len(EXPERIMENTS)
    ]
    assert [row.split("`")[1] for row in rows[len(EXPERIMENTS) :]] == list(PROTOCOLS)
    assert all(f"`{name}`" in text for name in DATASETS)
    for protocol in PROTOCOLS.values():
        assert f"| `{protocol.name}` | {protocol.meaning}" in text


def test_the_examples_of_the_docs_run():
    """The one that adds a protocol; the other one is the front door, which the runner's tests go through."""
    before = dict(EXPERIMENTS), dict(PROTOCOLS)
    text = (ROOT / "docs/benchmark.md").read_text()
    try:
        exec(re.findall(r"```python\n(.*?)```", text, re.S)[1], {})
        (episode,) = plan("night", "digits", seeds=(0,), limit=10).episodes("night", 0, 50)
        assert episode.summary().domains == {"clean": 5, "contrast-5": 5}
    finally:
        for known, kept in zip((EXPERIMENTS, PROTOCOLS), before, strict=True):
            known.clear()
            known.update(kept)


def test_every_value_is_complete():
    for name, experiment in EXPERIMENTS.items():
        assert experiment.name == name and experiment.shows and experiment.datasets
        assert set(experiment.protocols) <= set(PROTOCOLS) and set(experiment.methods) <= set(METHODS)
    for name, dataset in DATASETS.items():
        assert dataset.name == name and set(dataset.protocols) <= set(PROTOCOLS)
    for name, protocol in PROTOCOLS.items():
        assert protocol.name == name and protocol.meaning
        assert protocol.episodes(5, ["fog"], [5], labels=np.array([0, 1, 0, 1, 0]))


def test_a_data_set_is_one_value(monkeypatch):
    mine = Dataset("mine", "arrays:test", "arrays:train", "timm:resnet26", ("all-mixed",))
    monkeypatch.setitem(DATASETS, "mine", mine)
    assert plan("table1", "mine").protocols == ("all-mixed",) and "mine" in EXPERIMENTS["mixed"].datasets
    with pytest.raises(ValueError, match="experiment 'shift' is not for mine; choose from: mnist"):
        plan("shift", "mine")


def test_the_benchmark_has_no_logic_about_a_method():
    """Names of methods stand in data (the experiments' default rows, the paper's numbers), never in a condition."""
    named = re.compile(rf"""[=!]= *["']({"|".join(METHODS)})["']|METHODS\[["']|["']({"|".join(METHODS)})["'] in """)
    for path in (ROOT / "src/cafe_tta/bench").rglob("*.py"):
        lines = [line for line in path.read_text().splitlines() if named.search(line)]
        assert not lines, (path, lines)


def test_options_in_texts():
    assert parse_options(["lr=0.5"], "source,cafe(every=2)") == {"cafe": {"lr": 0.5}}
    with pytest.raises(ValueError, match=r"no method has an option 'warmth' \(warmth=3\)"):
        parse_options(["warmth=3"])
    with pytest.raises(ValueError, match="unknown method 'cofe'; did you mean 'cafe'"):
        plan("mixed", "digits", methods=["cofe(lr=1)"])
    with pytest.raises(ValueError, match="expected `mode` to be 'online' or 'offline', but got 'onlin'"):
        plan("mixed", "digits", mode="onlin")


def test_a_protocol_that_is_not_known_is_shown_all_the_same(tmp_path):
    runs = [record(protocol="tomorrow's", frechet_before=3.0, frechet_after=2.0), record("tent", protocol="tomorrow's")]
    made = report.make([save(tmp_path, runs)])
    assert made.tables[0].heads[0][:2] == ("cifar10", "tomorrow's") and draw_frechet(made.records)


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: str(folder.relative_to(ROOT / "docs/results")))
def test_committed_records_are_readable(folder):
    records = read(folder / RECORDS)
    assert records and report.make([folder]).tables
    assert all(record.images_per_second > 0 for record in records)
    assert main_columns(records) or {record.scope for record in records} <= {*EXPERIMENTS, *PROTOCOLS}


def test_neither_drawing_nor_models_are_loaded_before_they_are_needed():
    heavy = ("matplotlib", "timm", "torchvision", "cv2")
    code = f"import cafe_tta.bench, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_an_experiment_runs_under_other_protocols_by_name():
    assert plan("mixed", "digits", "source", protocols=["continual", "clean"]).protocols == ("continual", "clean")
    assert plan("mixed", "digits", "source").protocols == ("all-mixed",)
    with pytest.raises(ValueError, match=r"unknown protocol 'continous'; did you mean 'continual'\?; choose from: "):
        plan("mixed", "digits", "source", protocols=["continous"])
