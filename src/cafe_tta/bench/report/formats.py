"""Tables as Markdown, as LaTeX in the paper's form (with the packages booktabs and graphicx), and as one CSV file."""

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import astuple, fields

from cafe_tta.bench.report.tables import NOTHING, Cell, Measurement, Table

WIDEST = 8  # columns of numbers on a page; more are made smaller
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "é": r"\'{e}",
    "–": "--",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def to_markdown(tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    parts = ["# Results\n", *(_markdown_table(table) for table in tables)]
    notes = list(notes)
    if notes:
        parts.append("## Notes\n\n" + _markdown_list(notes))
    return "\n".join(parts)


def markdown_grid(table: Table) -> str:
    """The cells of a table alone, without title, caption and notes."""
    heads = [*table.stub, *(" ".join(filter(None, head)) for head in table.heads)]
    rules = ["---"] * len(table.stub) + ["--:"] * len(table.heads)
    lines = [
        list(map(escape_markdown, heads)),
        rules,
        *([*map(escape_markdown, line.head), *map(_markdown_cell, line.cells)] for line in table.lines),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown_table(table: Table) -> str:
    text = f"## {escape_markdown(table.title)}\n\n{markdown_grid(table)}"
    if table.caption:
        text += f"\n{escape_markdown(table.caption)}\n"
    if table.about:
        text += f"\n{_markdown_list(table.about)}"
    if table.notes:
        text += f"\nNotes:\n\n{_markdown_list(table.notes)}"
    return text


def _markdown_cell(cell: Cell) -> str:
    text = escape_markdown(cell.text)
    return {"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(cell.rank, text)


def _markdown_list(items: Iterable[str]) -> str:
    return "".join(f"- {escape_markdown(item)}\n" for item in items)


def escape_markdown(text: str) -> str:
    r"""
    >>> print(escape_markdown("a|b <i> _c_"))
    a\|b &lt;i&gt; \_c\_
    """
    plain = re.sub(r"([\\`*_|\[\]])", r"\\\1", " ".join(text.split()))
    return plain.replace("<", "&lt;").replace(">", "&gt;")


def to_latex(tables: Iterable[Table]) -> str:
    """One `table*` after the other."""
    return "% \\usepackage{booktabs,graphicx}\n" + "".join(f"\n{_latex_table(table)}" for table in tables)


def _latex_table(table: Table) -> str:
    wide = len(table.heads) > WIDEST
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        *([r"\resizebox{\textwidth}{!}{%"] if wide else []),
        rf"\begin{{tabular}}{{{'l' * len(table.stub)}{'r' * len(table.heads)}}}",
        r"\toprule",
        *_latex_heads(table),
        r"\midrule",
        *(f"{' & '.join([*map(escape_latex, line.head), *map(_latex_cell, line.cells)])} \\\\" for line in table.lines),
        r"\bottomrule",
        r"\end{tabular}" + ("}" if wide else ""),
        rf"\caption{{{escape_latex(table.title)}. {escape_latex(table.caption)}}}",
        rf"\label{{tab:{''.join(letter if letter.isalnum() else '-' for letter in table.name)}}}",
        r"\end{table*}",
        *(f"% {' '.join(note.split())}" for note in (*table.about, *table.notes)),
    ]
    return "\n".join(lines) + "\n"


def _latex_heads(table: Table) -> list[str]:
    lines = []
    for level in range(table.depth):
        last = level == table.depth - 1
        cells = list(map(escape_latex, table.stub)) if last else [""] * len(table.stub)
        rules, start = [], len(table.stub) + 1
        for text, width in table.spans(level):
            cells.append(escape_latex(text) if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(text)}}}")
            if width > 1:
                rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
            start += width
        lines.append(f"{' & '.join(cells)} \\\\")
        lines += [" ".join(rules)] if rules else []
    return lines


def _latex_cell(cell: Cell) -> str:
    if cell.text == NOTHING:
        return "--"
    mean, _, std = cell.text.partition(" ± ")
    number = mean.replace(", ", r",\ ").replace("○", r"\,\circ") if ", " in mean else mean.replace(",", "{,}")
    text = f"${number}_{{\\pm {std}}}$" if std else (escape_latex(mean) if mean == "N/A" else f"${number}$")
    return {"best": rf"\textbf{{\boldmath {text}}}", "second": rf"\underline{{{text}}}"}.get(cell.rank, text)


def escape_latex(text: str) -> str:
    r"""
    >>> print(escape_latex("50 % of a_b ± 1"))
    50 \% of a\_b $\pm$ 1
    """
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def to_csv(tables: Iterable[Table]) -> str:
    """All numbers, one per line, with full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Measurement)])
    writer.writerows(
        [_guarded(value) for value in astuple(measurement)] for table in tables for measurement in table.measurements
    )
    return text.getvalue()


def _guarded(value: object) -> object:
    """Names come from users, and spreadsheets run what begins like a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
