"""Ours beside what others published: the numbers, and how the settings differ."""

from collections.abc import Iterator, Sequence

from cafe_tta.bench import paper, published
from cafe_tta.bench.experiments import Row
from cafe_tta.bench.published import Number
from cafe_tta.bench.records import Record
from cafe_tta.bench.report.columns import Column, accuracy, estimates, main_columns, rows
from cafe_tta.bench.report.tables import Remark, Sheet, Table, has_usual_corruptions, unlike
from cafe_tta.methods import METHODS


def published_tables(records: Sequence[Record]) -> list[Table]:
    """For each column, the numbers of other papers. Those of the CAFe paper stand in the tables of accuracy."""
    tables = []
    for column in main_columns(records):
        pairs = list(_pairs(column))
        if pairs:
            tables.append(_table(column, pairs))
    return tables


def _pairs(column: Column) -> Iterator[tuple[Row, Number]]:
    """Rows that have a number, and numbers that somebody published for them; with other options, a row has none."""
    if not has_usual_corruptions(column):
        return
    measured, _ = estimates(column, rows(column.records), accuracy)
    for row in rows(column.records):
        if row.label == row.method and row.label in measured:
            for number in published.near(column.dataset, column.protocol, column.mode, row.method):
                if number.source != paper.SOURCE:
                    yield row, number


def _table(column: Column, pairs: Sequence[tuple[Row, Number]]) -> Table:
    sheet = Sheet(f"published-{column.dataset}-{column.protocol}-{column.mode}")
    sheet.heads = [("ours",), ("published",), ("difference",)]
    ours, _ = estimates(column, [row for row, _ in pairs], accuracy)
    for row, number in pairs:
        key, value = (row.label, number), ours[row.label]
        theirs = paper.Accuracy(number.accuracy, number.std)
        sheet.put(key, value.text())
        sheet.put(key, f"{number.accuracy:.2f}")
        sheet.put(key, f"{value.mean - number.accuracy:+.2f}")
        sheet.measured(column, row, "accuracy_percent", value, published=theirs)
        sheet.remarks += _differences(column, row, number)
    return sheet.table(
        f"Published numbers beside ours: {column.name}, {column.mode}",
        ("method", "published by", "with"),
        {(row.label, number): (row.label, _short(number.source), number.setting.model) for row, number in pairs},
        caption="Test accuracy [%]. Numbers can be compared only where the settings are the same: see the notes.",
        about=tuple(dict.fromkeys(_about(number) for _, number in pairs)),
    )


def _differences(column: Column, row: Row, number: Number) -> list[Remark]:
    """What differs between our setting and theirs; that of the batch belongs to the row."""
    setting, where = number.setting, f"{_short(number.source)}, {number.setting.model}"
    found = unlike(column, setting)
    if column.protocol != number.protocol:
        found.append(f"protocol {column.protocol} instead of {number.protocol}")
    remarks = [(where, f"here, {'; '.join(found)}")] if found else [(where, _SAME)]
    size = column.of(row.label)[0].config.get("batch_size")
    adapts = row.method not in METHODS or METHODS[row.method].adapts  # else batches make no difference
    if setting.batch_size and size != setting.batch_size and adapts:
        remarks.append((row.label, f"batches of {size} instead of {setting.batch_size} ({_short(number.source)})"))
    return remarks


_SAME = (
    "the same setting, as far as the records tell: model, images, corruptions and protocol; compare weights and "
    "preprocessing, which are named above"
)


def _about(number: Number) -> str:
    setting = number.setting
    facts = [
        f"{setting.model}{f' {setting.weights}' if setting.weights else ''}",
        f"{setting.images:,} images",
        f"batches of {setting.batch_size}" if setting.batch_size else "",
        f"preprocessing: {setting.preprocessing}" if setting.preprocessing else "",
        f"mean of {setting.seeds} seeds" if setting.seeds else "",
    ]
    return f"{number.source}: {', '.join(filter(None, facts))}"


def _short(source: str) -> str:
    """The name of a source, without its link."""
    return source.partition(":")[0].partition(",")[0]
