"""Tables as LaTeX, in the paper's form. They need the packages booktabs and graphicx."""

from collections.abc import Iterable

from cafe_tta.bench.report.table import NOTHING, Cell, Table

WIDEST = 8  # columns of numbers on a page; more are made smaller
_SPECIAL = {
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


def to_latex(tables: Iterable[Table]) -> str:
    """One `table*` after the other."""
    return "% \\usepackage{booktabs,graphicx}\n" + "".join(f"\n{_table(table)}" for table in tables)


def _table(table: Table) -> str:
    wide = len(table.heads) > WIDEST
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        *([r"\resizebox{\textwidth}{!}{%"] if wide else []),
        rf"\begin{{tabular}}{{{'l' * len(table.stub)}{'r' * len(table.heads)}}}",
        r"\toprule",
        *_heads(table),
        r"\midrule",
        *(f"{' & '.join([*map(escape, line.head), *map(_cell, line.cells)])} \\\\" for line in table.lines),
        r"\bottomrule",
        r"\end{tabular}" + ("}" if wide else ""),
        rf"\caption{{{escape(table.title)}. {escape(table.caption)}}}",
        rf"\label{{tab:{''.join(letter if letter.isalnum() else '-' for letter in table.name)}}}",
        r"\end{table*}",
        *(f"% {' '.join(note.split())}" for note in (*table.about, *table.notes)),
    ]
    return "\n".join(lines) + "\n"


def _heads(table: Table) -> list[str]:
    lines = []
    for level in range(table.depth):
        last = level == table.depth - 1
        cells = list(map(escape, table.stub)) if last else [""] * len(table.stub)
        rules, start = [], len(table.stub) + 1
        for text, width in table.spans(level):
            cells.append(escape(text) if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{escape(text)}}}")
            if width > 1:
                rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
            start += width
        lines.append(f"{' & '.join(cells)} \\\\")
        lines += [" ".join(rules)] if rules else []
    return lines


def _cell(cell: Cell) -> str:
    if cell.text == NOTHING:
        return "--"
    mean, _, std = cell.text.partition(" ± ")
    number = mean.replace(",", "{,}")
    text = f"${number}_{{\\pm {std}}}$" if std else (escape(mean) if mean == "N/A" else f"${number}$")
    return {"best": rf"\textbf{{\boldmath {text}}}", "second": rf"\underline{{{text}}}"}.get(cell.rank, text)


def escape(text: str) -> str:
    r"""
    >>> print(escape("50 % of a_b ± 1"))
    50 \% of a\_b $\pm$ 1
    """
    return "".join(_SPECIAL.get(character, character) for character in " ".join(text.split()))
