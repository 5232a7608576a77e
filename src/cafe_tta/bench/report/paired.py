"""Is a difference more than noise? Paired differences against a chosen row, by image and by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cafe_tta import corruptions
from cafe_tta.bench.experiments import Row
from cafe_tta.bench.records import MAIN, Hits, Record
from cafe_tta.bench.report.columns import (
    Column,
    Estimate,
    Value,
    accuracy,
    by_corruption,
    columns,
    corruptions_of,
    estimates,
    main_columns,
    rows,
)
from cafe_tta.bench.report.tables import Sheet, Table, count, worst_corruption
from cafe_tta.methods import METHODS
from cafe_tta.options import did_you_mean

LEVEL = 0.95  # of the intervals
UNSURE = "○"  # marks an interval that includes 0


@dataclass(frozen=True)
class Interval:
    """A mean difference, and the interval that it lies in, in points of per cent.

    >>> Interval(0.19, -0.28, 0.66).text(), Interval(0.84, 0.45, 1.23).text()
    ('[-0.28, +0.66] ○', '[+0.45, +1.23]')
    """

    mean: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        return self.low <= 0 <= self.high

    def text(self) -> str:
        return f"[{self.low:+.2f}, {self.high:+.2f}]{f' {UNSURE}' if self.includes_zero else ''}"


@dataclass(frozen=True)
class ByImage:
    """Two methods on the same images: on how many only one of them was right, and what follows."""

    interval: Interval
    only_here: int
    only_there: int
    p: float  # two-sided, that the two are equally good


def by_image(pairs: Sequence[Sequence[tuple[Hits, Hits]]]) -> ByImage:
    """For each seed, the episodes of one and the other method: which images were answered right.

    The difference is the mean over the episodes of a seed, then over seeds, as in the tables. With b images that only
    the one gets right, c that only the other does, and n in all, an episode has the difference d = (b - c) / n, whose
    variance is ((b + c) / n - d²) / (n - 1); p is that of z = d / σ (McNemar's test, without correction).

    >>> import numpy as np
    >>> here, there = np.array([1, 1, 1, 0, 1, 1], bool), np.array([1, 0, 1, 1, 0, 0], bool)
    >>> found = by_image([[(here, there)]])
    >>> found.only_here, found.only_there, round(found.interval.mean, 2)
    (3, 1, 33.33)
    """
    here = there = 0
    mean = variance = 0.0
    for episodes in pairs:
        for ours, theirs in episodes:
            wins, losses, size = int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), len(ours)
            weight = 1 / (len(pairs) * len(episodes))
            difference = (wins - losses) / size
            mean += weight * difference
            variance += weight**2 * ((wins + losses) / size - difference**2) / max(1, size - 1)
            here, there = here + wins, there + losses
    error = math.sqrt(variance)
    reach = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) * error
    p = math.erfc(abs(mean) / error / math.sqrt(2)) if error else float(mean == 0)
    return ByImage(Interval(100 * mean, 100 * (mean - reach), 100 * (mean + reach)), here, there, p)


def by_seed(differences: Sequence[float]) -> Interval | None:
    """The mean of one difference a seed, with Student's interval; None for a single seed."""
    if len(differences) < 2:
        return None
    from scipy.special import stdtrit  # which scikit-learn needs too; slow to import

    mean, count = statistics.fmean(differences), len(differences)
    reach = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean, mean - reach, mean + reach)


def against_tables(records: Sequence[Record], label: str) -> list[Table]:
    """For each column that has the row `label`: how far the others are from it."""
    labels = {record.label for record in records}
    if label not in labels:
        known = ", ".join(row.label for row in rows(records))
        raise ValueError(f"no runs of {label!r} to compare with{did_you_mean(label, labels)}; there are: {known}")
    made = [column for column in _by_scope(records) if column.of(label) and len(rows(column.records)) > 1]
    return [_against_table(column, label) for column in made]


def _by_scope(records: Sequence[Record]) -> list[Column]:
    """The columns of all tables."""
    scopes = dict.fromkeys(record.scope for record in records)
    return [column for scope in scopes for column in columns(r for r in records if r.scope == scope)]


def _against_table(column: Column, label: str) -> Table:
    scope = "" if column.first.scope == MAIN else f"{column.first.scope}-"
    sheet = Sheet(f"against-{scope}{column.dataset}-{column.protocol}-{column.mode}")
    sheet.heads = [("difference", "")]
    sheet.heads += [("by image", name) for name in ("95 % interval", "only here", "only there", "p")]
    sheet.heads += [("by seed", name) for name in ("95 % interval", "each")]
    lines = [row for row in rows(column.records) if row.label != label]
    for row in lines:
        differences, image = paired(column, row.label, label)
        seed = by_seed(list(differences.values()))
        mean = statistics.fmean(differences.values()) if differences else None
        sheet.put(row.label, None if mean is None else f"{mean:+.2f}")
        for text in _image_texts(image):
            sheet.put(row.label, text)
        sheet.put(row.label, seed.text() if seed else None)
        sheet.put(row.label, ", ".join(f"{value:+.2f}" for value in differences.values()) or None)
        _measure(sheet, column, row, differences, image, seed)
    if not any(record.hits for record in column.records):
        sheet.remarks.append((column.name, "these records do not say which images were answered right"))
    return sheet.table(
        f"Difference in test accuracy [points] against {label}: {column.name}, {column.mode}",
        ("method", "needs"),
        {row.label: (row.label, row.needs or "nothing") for row in lines},
        caption=(
            "By image: the same images, answered by both; only here: right with the method of the line alone. By seed: "
            f"Student's interval over seeds. {UNSURE}: the interval includes 0, so no difference is shown."
        ),
        about=(f"{column.name}: {count(len(column.seeds), 'seed')}, {column.images[-1]:,} images an episode",),
    )


def paired(
    column: Column, label: str, against: str, value: Value = accuracy
) -> tuple[dict[int, float], ByImage | None]:
    """For each seed that both rows have all episodes of, the difference of a value; and that by image.

    By image, accuracies are compared, where all records say which images were answered right.
    """
    ours, theirs = ({(r.seed, r.episode.name): r for r in column.of(name)} for name in (label, against))
    differences, pairs = {}, []
    for seed in column.seeds:
        keys = [(seed, name) for name in column.episodes]
        values = [(value(ours[key]), value(theirs[key])) for key in keys if key in ours and key in theirs]
        known = [here - there for here, there in values if here is not None and there is not None]
        if len(known) == len(keys):
            differences[seed] = statistics.fmean(known)
            hits = [(ours[key].right, theirs[key].right) for key in keys]
            pairs.append([(a, b) for a, b in hits if a is not None and b is not None])
    complete = bool(pairs) and all(len(episodes) == len(column.episodes) for episodes in pairs)
    return differences, by_image(pairs) if complete else None


def _measure(
    sheet: Sheet,
    column: Column,
    row: Row,
    differences: Mapping[int, float],
    image: ByImage | None,
    seed: Interval | None,
) -> None:
    """The numbers for the CSV file, each on a line of its own."""
    seeds = tuple(differences)
    numbers: dict[str, float] = {}
    if differences:
        numbers["difference"] = statistics.fmean(differences.values())
    if image:
        numbers |= {"by_image_low": image.interval.low, "by_image_high": image.interval.high, "by_image_p": image.p}
    if seed:
        numbers |= {"by_seed_low": seed.low, "by_seed_high": seed.high}
    for measure, value in numbers.items():
        sheet.measured(column, row, measure, Estimate(value, None, seeds))


def _image_texts(found: ByImage | None) -> tuple[str | None, ...]:
    if found is None:
        return (None,) * 4
    return found.interval.text(), f"{found.only_here:,}", f"{found.only_there:,}", p_text(found.p)


def p_text(p: float) -> str:
    """
    >>> p_text(0.0462), p_text(1e-9)
    ('0.046', '< 0.001')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


# By corruption


def corruption_tables(records: Sequence[Record]) -> list[Table]:
    """For each column with several corruptions: the worst one of each row, and what adapting gains and loses."""
    return [_corruption_table(column) for column in main_columns(records) if len(corruptions_of(column)) > 1]


def _corruption_table(column: Column) -> Table:
    sheet = Sheet(f"corruptions-{column.dataset}-{column.protocol}-{column.mode}")
    names, lines = corruptions_of(column), rows(column.records)
    complete, _ = estimates(column, lines, accuracy)
    lines = [row for row in lines if row.label in complete]
    found = {row.label: by_corruption(column.of(row.label)) for row in lines}
    unadapted = next((row.label for row in lines if row.label in METHODS and not METHODS[row.label].adapts), None)
    sheet.heads = [("worst", "accuracy")]
    if unadapted is not None:
        sheet.heads.append(("worst", "loss"))
        sheet.heads += [(_family(name), name) for name in names]
    heads = {}
    for row in lines:
        own = found[row.label]
        worst = worst_corruption(column, row)
        heads[row.label] = (row.label, worst[0] if worst else "")
        sheet.put(row.label, worst[1].text() if worst else None)
        if worst:
            sheet.measured(column, row, "worst_corruption_percent", worst[1])
        if unadapted is not None:
            changes = {n: own[n].mean - found[unadapted][n].mean for n in names if n in own and n in found[unadapted]}
            sheet.put(row.label, f"{min(0.0, *changes.values()):+.2f}" if changes else None)
            for name in names:
                sheet.put(row.label, f"{changes[name]:+.2f}" if name in changes else None)
                if name in changes:
                    value = Estimate(changes[name], None, own[name].seeds)
                    sheet.measured(column, row, f"against_{unadapted}_{name}", value)
    against = f"; by corruption, the difference against {unadapted}, the model without adaptation" if unadapted else ""
    return sheet.table(
        f"Worst corruption, and what adapting costs: {column.name}, {column.mode}",
        ("method", "worst corruption"),
        heads,
        caption=f"Accuracy [%] where it is lowest{against}, in points. Means over severities and seeds.",
    )


def _family(corruption: str) -> str:
    known = corruptions.CORRUPTIONS.get(corruption)
    return known.group if known else "other"
