"""Paired differences against scipy, a simulation and numbers counted by hand."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from cafe_tta.bench import report
from cafe_tta.bench.records import packed
from cafe_tta.bench.report.paired import by_image, by_seed
from cafe_tta.cli import app

from .report_records import cells, record, save, table


@settings(deadline=None)
@given(st.integers(2, 400), st.integers(0, 10**6))
def test_the_difference_of_one_episode_is_that_of_a_paired_z_test(size, seed):
    random = np.random.default_rng(seed)
    here = random.random(size) < 0.6
    there = np.where(random.random(size) < 0.8, here, ~here)
    found = by_image([[(here, there)]])
    differences = here.astype(float) - there
    error = differences.std(ddof=1) / math.sqrt(size)
    assert found.interval.mean == pytest.approx(100 * differences.mean())
    if error:
        low, high = stats.norm.interval(0.95, loc=differences.mean(), scale=error)
        assert (found.interval.low, found.interval.high) == pytest.approx((100 * low, 100 * high))
        assert found.p == pytest.approx(2 * stats.norm.sf(abs(differences.mean()) / error))
    assert (found.only_here, found.only_there) == ((differences > 0).sum(), (differences < 0).sum())


def test_p_is_near_that_of_the_exact_test():
    """McNemar's: of the images that only one gets right, half would be each one's."""
    here, there = np.zeros(1000, bool), np.zeros(1000, bool)
    here[:60], there[60:100] = True, True
    assert by_image([[(here, there)]]).p == pytest.approx(stats.binomtest(60, 100).pvalue, abs=0.02)


def test_episodes_and_seeds_weigh_alike():
    """As in the tables: first the mean over the episodes of a seed, whatever their size, then over seeds."""
    ones, zeros = (lambda n: np.ones(n, bool)), (lambda n: np.zeros(n, bool))
    pairs = [[(ones(10), zeros(10)), (zeros(1000), zeros(1000))], [(ones(4), ones(4)), (zeros(6), zeros(6))]]
    assert by_image(pairs).interval.mean == pytest.approx(25)


def test_the_interval_has_the_mean_of_95_in_100_repetitions():
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        pairs = []
        for _ in range(3):
            here = random.random(500) < 0.6
            there = np.where(random.random(500) < 0.85, here, random.random(500) < 0.5)
            pairs.append([(here, there)])
        interval = by_image(pairs).interval
        inside += interval.low <= 100 * 0.15 * 0.1 <= interval.high  # 0.6 against 0.85 · 0.6 + 0.15 · 0.5
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_methods_that_answer_alike_do_not_differ():
    same = np.array([True, False, True])
    found = by_image([[(same, same)]])
    assert found.interval.includes_zero and found.p == 1 and found.interval.low == found.interval.high == 0


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=10))
def test_the_interval_by_seed_is_students(values):
    found = by_seed(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    if error > 1e-9:
        expected = stats.t.interval(0.95, len(values) - 1, loc=statistics.fmean(values), scale=error)
        assert (found.low, found.high) == pytest.approx(expected)
    assert found.mean == pytest.approx(statistics.fmean(values))


def test_one_seed_has_no_interval():
    assert by_seed([0.5]) is None


def with_hits(method, seed, right, **changes):
    hits = np.zeros(10000, bool)
    hits[list(right)] = True
    return record(method, hits.mean(), seed=seed, episode__digest=str(seed), hits=packed(hits), **changes)


@pytest.fixture
def runs(tmp_path):
    """Tent is right where infomax is, and on 100 more images; with seed 1, on 300 more."""
    runs = [with_hits("infomax", seed, range(5000)) for seed in (0, 1)]
    runs += [with_hits("tent", 0, range(5100)), with_hits("tent", 1, range(5300))]
    runs += [with_hits("source", seed, range(20, 5020)) for seed in (0, 1)]
    return save(tmp_path, runs)


def test_the_report_compares_with_a_row(runs):
    made = report.make([runs], against="infomax")
    name = "against-cifar10-all-mixed-offline"
    error = math.sqrt((0.01 - 0.01**2) / 9999 + (0.03 - 0.03**2) / 9999) / 2
    low, high = 100 * (0.02 - 1.959964 * error), 100 * (0.02 + 1.959964 * error)
    by_seeds = "[-10.71, +14.71] ○"  # 2 ± 12.706 · √2 / √2
    assert cells(made, name, "tent") == [
        "+2.00", f"[{low:+.2f}, {high:+.2f}]", "400", "0", "< 0.001", by_seeds, "+1.00, +3.00",
    ]  # fmt: skip
    source = cells(made, name, "source")
    assert source[0] == "+0.00" and source[1].endswith("○") and source[2:5] == ["40", "40", "1.000"]
    assert [line.head[0] for line in table(made, name).lines] == ["source", "tent"]
    assert made.command == f"cafe-tta report {runs} --against infomax"
    found = {number.measure: number.mean for number in table(made, name).measurements if number.label == "tent"}
    assert found["difference"] == pytest.approx(2) and found["by_image_low"] == pytest.approx(low)
    assert found["by_seed_high"] == pytest.approx(14.706, abs=1e-3)


def test_records_without_hits_are_compared_by_seed_alone(tmp_path):
    runs = [
        record(name, 0.5 + 0.1 * seed, seed=seed, episode__digest=str(seed))
        for name in ("tent", "cafe")
        for seed in (0, 1)
    ]
    made = report.make([save(tmp_path, runs)], against="tent")
    shown = table(made, "against-cifar10-all-mixed-offline")
    assert [cell.text for cell in shown.lines[0].cells] == [
        "+0.00",
        "–",
        "–",
        "–",
        "–",
        "[+0.00, +0.00] ○",
        "+0.00, +0.00",
    ]
    assert shown.notes == ("cifar10 all-mixed: these records do not say which images were answered right",)


def test_a_row_that_is_not_there(runs):
    with pytest.raises(
        ValueError, match=r"no runs of 'infomx' to compare with; did you mean 'infomax'\?; there are: sou"
    ):
        report.make([runs], against="infomx")
    result = CliRunner().invoke(app, ["report", str(runs), "--against", "tent"])
    assert result.exit_code == 0 and "against tent" in result.stdout, result.output
    assert "[-14.71, +10.71] ○" in (runs / "report/tables.md").read_text().replace("\\", "")
    assert r"\,\circ" in (runs / "report/tables.tex").read_text()


def test_losses_by_corruption_by_hand(tmp_path):
    by_seed = {"source": ({"fog-5": 0.5, "snow-5": 0.7}, {"fog-5": 0.4, "snow-5": 0.6})}
    by_seed["cafe"] = ({"fog-5": 0.7, "snow-5": 0.6}, {"fog-5": 0.6, "snow-5": 0.6})
    runs = [
        record(name, 0.6, seed=seed, by_domain=found, episode__digest=str(seed))
        for name, both in by_seed.items()
        for seed, found in enumerate(both)
    ]
    shown = table(report.make([save(tmp_path, runs)]), "corruptions-cifar10-all-mixed-offline")
    assert shown.heads == (("worst", "accuracy"), ("worst", "loss"), ("weather", "snow"), ("weather", "fog"))
    assert [line.head for line in shown.lines] == [("source", "fog"), ("cafe", "snow")]
    assert [[cell.text for cell in line.cells] for line in shown.lines] == [
        ["45.00 ± 7.07", "+0.00", "+0.00", "+0.00"],
        ["60.00 ± 0.00", "-5.00", "-5.00", "+20.00"],
    ]
    alone = table(report.make([save(tmp_path, runs[2:])]), "corruptions-cifar10-all-mixed-offline")
    assert alone.heads == (("worst", "accuracy"),)
