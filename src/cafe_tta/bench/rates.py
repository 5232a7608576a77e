"""Learning rates: the same search for every method, and a plan at the rates that it found.

Search on source images with held-out corruptions, then use what was found on the test images:

    cafe-tta bench mixed --data SOURCE --corruptions held-out --rates 0.1,0.3,1,3,10 --output rates
    cafe-tta bench mixed --rates-of rates
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cafe_tta.bench.experiments import Plan, Row, labelled, usual_config
from cafe_tta.bench.records import Record, collect

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)


def search(plan: Plan, factors: Sequence[float] = FACTORS) -> Plan:
    """The plan with a row for each multiple of each row's own learning rate; rows without a rate stay as they are.

    >>> from cafe_tta.bench.experiments import plan
    >>> [row.label for row in search(plan("mixed", "digits", "unmix, tent"), (1, 3)).rows]
    ['unmix', 'tent(lr=0.001)', 'tent(lr=0.003)']
    """
    if not factors or min(factors) <= 0:
        raise ValueError(f"expected `factors` to be numbers above 0, but got {list(factors)}")
    rows: dict[str, Row] = {}
    for row in plan.rows:
        for made in [_at(row, row.config.lr * factor) for factor in factors] if _has_rate(row) else [row]:
            rows[made.label] = made
    return replace(plan, rows=tuple(rows.values()))


def best(plan: Plan, folder: str | Path | Sequence[str | Path]) -> Plan:
    """The plan with each row at the learning rate that was most accurate in the records of a search."""
    paths = [Path(folder)] if isinstance(folder, (str, Path)) else [Path(path) for path in folder]
    found = accuracies(collect(paths)[0])
    where = ", ".join(map(str, paths))
    rows = [
        _at(row, best_rate(_found(row, found, where), row.config.lr)) if _has_rate(row) else row for row in plan.rows
    ]
    return replace(plan, rows=tuple(rows))


def accuracies(records: Iterable[Record]) -> dict[str, dict[float, float]]:
    """Mean accuracy at each learning rate, by the label that a row has without its rate."""
    seen: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.config.get("lr"):
            seen[without_rate(record.label)][record.config["lr"]].append(record.accuracy)
    return {
        label: {rate: statistics.fmean(values) for rate, values in sorted(rates.items())}
        for label, rates in seen.items()
    }


def usual_rate(record: Record) -> float | None:
    """The learning rate of a record's method where nobody sets one: its preset's, for the data set and mode."""
    return getattr(usual_config(record.method, record.dataset, record.mode), "lr", None)


def without_rate(label: str) -> str:
    """
    >>> without_rate("tent(lr=0.01)"), without_rate("roid(normalisation=unmix,lr=0.01)"), without_rate("cafe")
    ('tent', 'roid(normalisation=unmix)', 'cafe')
    """
    return re.sub(r"\(\)$", "", re.sub(r"(?<=\()lr=[^,()]+,?|,lr=[^,()]+", "", label))


def _has_rate(row: Row) -> bool:
    return bool(getattr(row.config, "lr", None))


def _at(row: Row, rate: float) -> Row:
    rate = float(f"{rate:.6g}")  # 0.3 * 0.001 is 0.00029999999999999997
    label = labelled(without_rate(row.label), f"lr={rate:g}")
    return replace(row, label=label, config=replace(row.config, lr=rate))


def best_rate(rates: Mapping[float, float], own: float) -> float:
    """The rate of the highest accuracy; of several that are level, the one nearest to the method's own.

    >>> best_rate({0.1: 0.7, 0.2: 0.9, 0.4: 0.9}, own=0.5)
    0.4
    """
    return max(rates, key=lambda rate: (rates[rate], -abs(math.log(rate / own))))


def _found(row: Row, found: Mapping[str, Mapping[float, float]], where: str) -> Mapping[float, float]:
    label = without_rate(row.label)
    rates = found.get(label, {})
    if len(rates) < 2:
        raise ValueError(
            f"expected runs of {label} at several learning rates in {where}, but found {len(rates) or 'none'}; make "
            "them with --rates, or leave the row out with --methods"
        )
    return rates
