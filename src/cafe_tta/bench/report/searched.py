"""The table of a search for learning rates: every row at several rates, and the one that was best."""

from collections.abc import Sequence

from cafe_tta.bench.rates import accuracies, best_rate, usual_rate, without_rate
from cafe_tta.bench.records import Record
from cafe_tta.bench.report.columns import Column, main_columns, rows
from cafe_tta.bench.report.tables import Sheet, Table


def rates_tables(records: Sequence[Record]) -> list[Table]:
    """For each main column in which a row was run at several learning rates: accuracy by rate."""
    return [table for column in main_columns(records) if (table := _rates_table(column)) is not None]


def _rates_table(column: Column) -> Table | None:
    found = {label: rates for label, rates in accuracies(column.records).items() if len(rates) > 1}
    firsts = {without_rate(record.label): record for record in reversed(column.records)}
    usual = {label: rate for label in found if (rate := usual_rate(firsts[label]))}
    if not usual:
        return None
    multiples = {label: {_multiple(rate, usual[label]): rate for rate in found[label]} for label in usual}
    factors = sorted({factor for own in multiples.values() for factor in own})
    sheet = Sheet(f"rates-{column.dataset}-{column.protocol}-{column.mode}")
    sheet.heads = [*((f"× {factor:g}",) for factor in factors), ("best rate",)]
    order = [row.label for row in rows(column.records)]
    labels = sorted(usual, key=lambda label: order.index(firsts[label].label))
    for label in labels:
        rates = found[label]
        best = best_rate(rates, usual[label])
        for factor in factors:
            rate = multiples[label].get(factor)
            sheet.put(label, None if rate is None else f"{100 * rates[rate]:.2f}", "best" if rate == best else "")
        sheet.put(label, f"{best:g}")
    heads = {label: (label, f"{usual[label]:g}") for label in labels}
    return sheet.table(
        f"Accuracy [%] by learning rate, in multiples of each method's own: {column.name}, {column.mode}",
        ("method", "own rate"),
        heads,
        caption="Mean over seeds. The best rate of each row in bold: `--rates-of` takes it.",
    )


def _multiple(rate: float, usual: float) -> float:
    return float(f"{rate / usual:.3g}")
