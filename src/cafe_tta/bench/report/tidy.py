"""All numbers as one tidy CSV file: a line for each, with full precision."""

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, fields

from cafe_tta.bench.report.table import Fact, Table


def to_csv(tables: Iterable[Table]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Fact)])
    writer.writerows([_guarded(value) for value in astuple(fact)] for table in tables for fact in table.facts)
    return text.getvalue()


def _guarded(value: object) -> object:
    """Names come from users, and spreadsheets run what begins like a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
