"""A stream that does not wait: which batches are missed, counted by hand, and what answers them."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import cafe_tta as cafe
from cafe_tta import corruptions, data, models
from cafe_tta.bench import pace, plan, protocols, report, source_side
from cafe_tta.bench.evaluate import Stream, evaluate
from cafe_tta.bench.experiments import DATASETS
from cafe_tta.bench.jobs import run
from cafe_tta.bench.pace import Clock, Pace
from cafe_tta.cli.app import app

from .report_records import record, save

PREPROCESSING = models.Preprocessing(size=32, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    return cafe.split_classifier(models.build("cafe:digits-resnet", num_classes=10).eval())


@pytest.fixture(scope="module")
def images():
    digits = data.load("digits:test")
    (episode,) = protocols.all_mixed(len(digits), corruptions.NAMES, (5,), limit=95)
    return Stream(digits, episode, PREPROCESSING)


@pytest.mark.parametrize(
    ("cost", "learnt"),
    [
        (0.4, range(10)),
        (1, range(10)),
        (1.5, (0, 1, 3, 4, 6, 7, 9)),  # busy until 1.5, 3, …: batch 1 waits, batch 2 is missed
        (2, (0, 2, 4, 6, 8)),
        (2.5, (0, 2, 5, 7)),
        (4, (0, 4, 8)),
        (100, (0,)),
    ],
)
def test_a_slow_method_misses_batches(classifier, images, cost, learnt):
    """Ten batches, the last one of 5. What is missed is answered by the model as it then is."""
    clock = Clock(cost, classifier)
    adapter = cafe.create("infomax", classifier, batch_size=10, lr=0.1)
    outcome = evaluate(adapter, images, "online", clock=clock)
    twin, expected, missed = cafe.create("infomax", classifier, batch_size=10, lr=0.1), [], 0
    for number, batch in enumerate(images.batches(10)):
        logits = twin(batch.images) if number in learnt else twin.predict(batch.images)
        missed += 0 if number in learnt else len(batch.images)
        expected.append(logits.argmax(1) == batch.labels)
    assert torch.equal(outcome.hits, torch.cat(expected)) and outcome.steps == len(learnt)
    assert clock.missed == missed and clock.mean_cost == cost
    assert (outcome.forward, outcome.backward) == (95, 95 - missed)
    state = twin.state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in adapter.state().items())


def test_a_method_that_keeps_up_is_not_disturbed(classifier, images):
    adapter = cafe.create("infomax", classifier, batch_size=10)
    paced, plain = evaluate(adapter, images, "online", clock=Clock(1, classifier)), evaluate(adapter, images, "online")
    assert torch.equal(paced.hits, plain.hits) and paced.calibration_error == plain.calibration_error


def test_measured_costs_are_those_of_the_clock_on_the_wall(classifier, images, monkeypatch):
    """A forward pass takes 2 s and a step 5 s: 2.5 passes, so three of five batches are missed."""
    clock = Clock(None, classifier)
    monkeypatch.setattr(clock, "_forward", 2.0)
    real = pace.stream.adapt
    monkeypatch.setattr(pace.stream, "adapt", lambda *args: (replace(answer, seconds=5.0) for answer in real(*args)))
    outcome = evaluate(cafe.create("infomax", classifier, batch_size=10), images, "online", clock=clock)
    assert clock.mean_cost == 2.5 and outcome.steps == 4 and clock.missed == 55


@given(st.floats(1, 8))
def test_one_batch_in_k_is_learnt_from(cost):
    """Also where k is a little more than 1: such a method misses next to nothing."""

    class Counts:
        learnt = 0

    def adapt(adapter, batches):
        adapter.learnt += 1
        return iter([SimpleNamespace(seconds=cost)])

    counts, clock = Counts(), Clock(cost, None)
    batches = [SimpleNamespace(images=[None])] * 400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace.stream, "adapt", adapt)
        patch.setattr(pace.stream, "evaluate", lambda adapter, batches: iter(batches))
        assert len(list(clock.answers(counts, batches))) == 400
    assert counts.learnt == pytest.approx(400 / cost, abs=2) and clock.missed == 400 - counts.learnt


def test_the_pace_is_that_of_plain_forward_passes(classifier, images, monkeypatch):
    seconds = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])  # 3, 1 and 2 s
    clock, (batch, *_) = Clock(None, classifier), images.batches(10)
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(pace.stream, "evaluate", lambda *args: iter(()))
    assert clock._plain(batch) == clock._plain(batch) == 2.0


def test_costs_from_texts():
    costs = Pace.parse("tent=2,cafe=3.5")
    assert (costs.cost("tent"), costs.cost("cafe(lr=0.1)")) == (2.0, 3.5)
    with pytest.raises(ValueError, match="expected a cost of sar in `pace`, but got 'tent=2,cafe=3.5'; write sar="):
        costs.cost("sar")
    for text in ("fast", "tent=", "0", "-1", "inf", "tent=2,tent=3"):
        with pytest.raises(ValueError, match="expected `pace` to be 'measured', a cost such as 3, or costs of methods"):
            Pace.parse(text)
    with pytest.raises(ValueError, match="expected `mode` to be 'online' with `pace`, but got 'offline'"):
        plan("mixed", "digits", "source", pace="3")
    with pytest.raises(ValueError, match="expected a cost of adabn in `pace`"):
        plan("online", "digits", "source,adabn", pace="source=1")
    with pytest.raises(ValueError, match="expected no `pace` with `synchronised`"):
        run(plan("online", DATASETS["digits"], "source", pace="3"), "nowhere", synchronised=True)


def test_time_limited_runs_have_a_column_of_their_own(tmp_path):
    limited = {"setting": "3", "cost": 3.0, "missed": 6000}
    runs = [record("tent", mode="online"), record("tent", 0.4, mode="online", pace=limited)]
    runs.append(record("cafe", 0.45, mode="online", pace=limited))
    made = report.make([save(tmp_path, runs)], with_paper=False)
    assert [head[1] for head in made.tables[0].heads] == ["all-mixed", "all-mixed, time-limited"]
    assert [[cell.text for cell in line.cells] for line in made.tables[0].lines] == [["50.00", "40.00"], ["–", "45.00"]]
    runs[2]["pace"] = limited | {"setting": "measured"}
    with pytest.raises(ValueError, match=r'differ in the pace of the stream: "(3|measured)" in'):
        report.make([save(tmp_path, runs)])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(source_side, "DIGITS_TRAINING", replace(source_side.DIGITS_TRAINING, epochs=1, swag_epochs=1))
    command = ["bench", "mixed", "--limit", "20", "--seeds", "1", "--mode", "online", "--no-frechet"]
    command += ["--methods", "source,infomax", "--batch-size", "30", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, "--pace", "2"])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [run["pace"] for run in found] == [{"setting": "2", "cost": 2.0, "missed": 60}] * 2  # of 120 images
    assert found[1]["steps"] == 2 and "time-limited" in result.stdout
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "pace='2' there, None here" in result.stderr
    shutil.copytree(tmp_path / "source", tmp_path / "measured/source")
    result = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "measured"), "--pace", "measured"])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in (tmp_path / "measured/records.jsonl").read_text().splitlines()]
    assert found[1]["pace"]["setting"] == "measured" and found[1]["pace"]["cost"] > 0
