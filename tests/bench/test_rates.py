"""The search for learning rates: rows at multiples of each method's own, and a plan at the best of them."""

import pytest
from typer.testing import CliRunner

from cafe_tta.bench import plan, rates, report
from cafe_tta.cli.app import app

from .report_records import cells, record, save


def searched(tmp_path, found):
    """Records of rows at learning rates, with their accuracies by seed."""
    runs = []
    for label, by_rate in found.items():
        for rate, accuracies in by_rate.items():
            for seed, accuracy in enumerate(accuracies):
                named = f"{label}(lr={rate})" if "(" not in label else f"{label[:-1]},lr={rate})"
                method = label.partition("(")[0]
                runs.append(
                    record(method, accuracy, label=named, config={"lr": rate}, seed=seed, episode__digest=str(seed))
                )
    return save(tmp_path, runs)


def test_each_row_is_searched_at_multiples_of_its_own_rate():
    searching = rates.search(plan("mixed", "cifar10", "source,tent,roid(normalisation=unmix),ttac"), (0.3, 1))
    assert [(row.label, getattr(row.config, "lr", None)) for row in searching.rows] == [
        ("source", None),
        ("tent(lr=0.0003)", 0.0003),
        ("tent(lr=0.001)", 0.001),
        ("roid(normalisation=unmix,lr=0.0003)", 0.0003),
        ("roid(normalisation=unmix,lr=0.001)", 0.001),
        ("ttac(lr=0.003)", 0.003),
        ("ttac(lr=0.01)", 0.01),
    ]
    assert searching.rows[3].config.normalisation == "unmix"


def test_a_row_that_names_its_rate_is_searched_around_it_and_appears_once():
    searching = rates.search(plan("mixed", "digits", "tent(lr=0.01),tent"), (0.1, 1))
    assert [row.label for row in searching.rows] == ["tent(lr=0.001)", "tent(lr=0.01)", "tent(lr=0.0001)"]


@pytest.mark.parametrize("factors", [(), (1, 0), (-1,)])
def test_factors_are_above_zero(factors):
    with pytest.raises(ValueError, match=r"expected `factors` to be numbers above 0, but got \["):
        rates.search(plan("mixed", "digits", "tent"), factors)


def test_the_best_rate_is_that_of_the_highest_mean_over_seeds(tmp_path):
    searched(
        tmp_path,
        {
            "tent": {0.0001: (0.5, 0.9), 0.001: (0.69, 0.69), 0.01: (0.1, 0.99)},
            "roid(normalisation=unmix)": {0.001: (0.4,), 0.01: (0.6,)},
            "cafe": {0.001: (0.6,), 0.003: (0.6,)},  # level: the method's own stays
        },
    )
    tuned = rates.best(plan("mixed", "digits", "source,tent,roid(normalisation=unmix),cafe"), tmp_path)
    assert [row.label for row in tuned.rows] == [
        "source",
        "tent(lr=0.0001)",
        "roid(normalisation=unmix,lr=0.01)",
        "cafe(lr=0.001)",
    ]
    assert [getattr(row.config, "lr", None) for row in tuned.rows] == [None, 0.0001, 0.01, 0.001]


def test_a_row_that_was_not_searched_is_refused(tmp_path):
    searched(tmp_path, {"tent": {0.001: (0.5,)}})
    for methods, found in (("tent", "1"), ("cafe", "none")):
        with pytest.raises(ValueError, match=f"expected runs of {methods} at several .*, but found {found}; make them"):
            rates.best(plan("mixed", "digits", methods), tmp_path)


def test_the_report_shows_accuracy_by_rate(tmp_path):
    searched(tmp_path, {"tent": {0.0001: (0.5,), 0.001: (0.7,)}, "zerosiam": {0.0025: (0.5,), 0.025: (0.4,)}})
    made = report.make([tmp_path])
    (table,) = [table for table in made.tables if table.name.startswith("rates-")]
    assert [head for (head,) in table.heads] == ["× 0.1", "× 1", "× 10", "best rate"]
    assert [line.head for line in table.lines] == [("tent", "0.001"), ("zerosiam", "0.0025")]
    assert cells(made, table.name, "tent") == ["50.00", "70.00", "–", "0.001"]
    assert cells(made, table.name, "zerosiam") == ["–", "50.00", "40.00", "0.0025"]


def test_one_rate_makes_no_such_table(tmp_path):
    searched(tmp_path, {"tent": {0.001: (0.5,)}})
    assert not any(table.name.startswith("rates-") for table in report.make([tmp_path]).tables)


def test_searching_and_using_at_once_is_refused(tmp_path):
    asked = ["bench", "mixed", "--rates", "1,3", "--rates-of", str(tmp_path)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code != 0
    assert "expected --rates or --rates-of, but got both" in result.output
