"""Tables as Markdown."""

import re
from collections.abc import Iterable

from cafe_tta.bench.report.table import Cell, Table


def to_markdown(tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    parts = ["# Results\n", *(_table(table) for table in tables)]
    notes = list(notes)
    if notes:
        parts.append("## Notes\n\n" + _list(notes))
    return "\n".join(parts)


def _table(table: Table) -> str:
    heads = [*table.stub, *(" ".join(filter(None, head)) for head in table.heads)]
    rules = ["---"] * len(table.stub) + ["--:"] * len(table.heads)
    lines = [heads, rules, *([*map(escape, line.head), *map(_cell, line.cells)] for line in table.lines)]
    lines[0] = [escape(head) for head in heads]
    text = f"## {escape(table.title)}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if table.caption:
        text += f"\n{escape(table.caption)}\n"
    if table.about:
        text += f"\n{_list(table.about)}"
    if table.notes:
        text += f"\nNotes:\n\n{_list(table.notes)}"
    return text


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    return {"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(cell.rank, text)


def _list(items: Iterable[str]) -> str:
    return "".join(f"- {escape(item)}\n" for item in items)


def escape(text: str) -> str:
    r"""
    >>> print(escape("a|b <i> _c_"))
    a\|b &lt;i&gt; \_c\_
    """
    plain = re.sub(r"([\\`*_|\[\]])", r"\\\1", " ".join(text.split()))
    return plain.replace("<", "&lt;").replace(">", "&gt;")
