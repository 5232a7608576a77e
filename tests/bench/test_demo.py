"""The demonstration, really run, on less of everything."""

import json
from dataclasses import replace

from typer.testing import CliRunner

import cafe_tta as cafe
from cafe_tta.bench import demo
from cafe_tta.cli.app import app


def test_demo_compares_every_method_and_draws_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TRAINING", replace(demo.TRAINING, epochs=2, swag_epochs=1))
    monkeypatch.setattr(demo, "COPIES", 1)
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path / "demo"), "--seeds", "1"])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert list(numbers["methods"]) == list(cafe.METHODS)
    for name, values in numbers["methods"].items():
        assert name in result.stdout and f"{100 * values['accuracy'][0]:.2f}" in result.stdout
        assert values["frechet"][0] > 0 and len(values["by_corruption"][0]) == 15
    assert numbers["clean_accuracy"] > 0.5  # two epochs have taught it something
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 20_000
    assert (tmp_path / "demo" / "demo.svg").read_text().startswith("<?xml")
