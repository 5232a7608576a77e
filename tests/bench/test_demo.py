"""The demonstration, really run, on less of everything."""

from dataclasses import replace

from typer.testing import CliRunner

import cafe_tta as cafe
from cafe_tta.bench import source_side
from cafe_tta.bench.experiments import DATASETS
from cafe_tta.bench.records import read
from cafe_tta.cli.app import app


def test_demo_compares_the_methods_of_the_tables_and_draws_a_picture(tmp_path, monkeypatch):
    training = replace(source_side.DIGITS_TRAINING, epochs=2, swag_epochs=1)
    monkeypatch.setattr(source_side, "DIGITS_TRAINING", training)
    monkeypatch.setitem(DATASETS, "digits", replace(DATASETS["digits"], copies=1))
    arguments = ["demo", "--output", str(tmp_path / "demo"), "--seeds", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    records = read(tmp_path / "demo" / "records.jsonl")
    assert [record.method for record in records] == [name for name, kind in cafe.METHODS.items() if kind.in_tables]
    assert {"cafe", "dann"} <= {record.method for record in records} < set(cafe.METHODS)
    for record in records:
        assert record.method in result.stdout and f"{100 * record.accuracy:.2f}" in result.stdout
        assert f"{record.frechet_after:.2f}" in result.stdout
        assert f"{1000 / record.images_per_second:.2f}" in result.stdout
        assert record.frechet_after > 0 and len(record.by_domain) == 15
    heads = ("method", "needs from the source", "accuracy %", "Fréchet distance", "ms / image")
    assert all(head in result.stdout for head in heads)
    again = CliRunner().invoke(app, arguments)
    assert again.stdout == result.stdout and len(read(tmp_path / "demo" / "records.jsonl")) == len(records)
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 20_000
    assert (tmp_path / "demo" / "demo.svg").read_text().startswith("<?xml")
