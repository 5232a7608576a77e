"""The paper's tables: accuracy of every method on every data set and protocol, with the paper's number beside ours."""

from collections.abc import Sequence

from cafe_tta import corruptions
from cafe_tta.bench import paper
from cafe_tta.bench.report import notes
from cafe_tta.bench.report.columns import Column, Row, columns, rows
from cafe_tta.bench.report.estimates import Estimate, Incomplete, estimate, ranks
from cafe_tta.bench.report.records import MAIN, Record
from cafe_tta.bench.report.table import Cell, Fact, Line, Table, fact, needs_text, published_text

TITLES = {
    (MAIN, "offline"): "Test accuracy [%], offline: every image is answered after all of them were seen",
    (MAIN, "online"): "Test accuracy [%], online: every batch is answered when it comes",
    ("shift", "offline"): "Test accuracy [%] on another data set (the paper's: from SVHN to MNIST)",
    ("clean", "offline"): "Test accuracy [%] on the same distribution: nothing has shifted",
    ("dann", "offline"): "Test accuracy [%] beside unsupervised domain adaptation",
}


def accuracy_tables(records: Sequence[Record], with_paper: bool) -> list[Table]:
    """One table for each mode of the main experiments and of each experiment that has a table of its own."""
    tables = []
    for scope in dict.fromkeys(scope for scope, _ in TITLES):
        for mode in ("offline", "online"):
            own = [record for record in records if record.scope == scope and record.mode == mode]
            if own:
                name = f"{'accuracy' if scope == MAIN else scope}-{mode}"
                title = TITLES.get((scope, mode), f"{TITLES[scope, 'offline']}, {mode}")
                tables.append(accuracy_table(name, title, columns(own), rows(own), with_paper))
    return tables


def accuracy_table(name: str, title: str, made: list[Column], lines: list[Row], with_paper: bool) -> Table:
    heads: list[tuple[str, ...]] = []
    cells: dict[str, list[Cell]] = {row.label: [] for row in lines}
    facts: list[Fact] = []
    remarks: list[notes.Remark] = []
    compared = [column for column in made if with_paper and any(printed(column, row) for row in lines)]
    for column in made:
        found, cut = estimates(column, lines)
        best = _ranks(lines, {label: value.mean for label, value in found.items()})
        theirs = {row.label: printed(column, row) for row in lines} if column in compared else {}
        their_best = _ranks(lines, {k: value.mean for k, value in theirs.items() if isinstance(value, paper.Accuracy)})
        sub = "ours" if column in compared else ""
        heads.append((column.dataset, column.protocol, sub) if compared else (column.dataset, column.protocol))
        if column in compared:
            heads.append((column.dataset, column.protocol, "paper"))
        for row in lines:
            value, rank = found.get(row.label), best.get(row.label, "")
            cells[row.label].append(Cell(value.text(), rank) if value else Cell())
            if column in compared:
                cells[row.label].append(Cell(published_text(theirs[row.label]), their_best.get(row.label, "")))
            if value:
                published = theirs.get(row.label)
                facts.append(fact(name, column, row, "accuracy_percent", value, rank=rank, paper=published))
        remarks += notes.gaps(column, lines, found, cut) + notes.warnings(column)
        remarks += notes.unlike_the_paper(column) if column in compared else []
    return Table(
        name=name,
        title=title,
        stub=("method", "needs"),
        heads=tuple(heads),
        lines=tuple(Line((row.label, needs_text(row)), tuple(cells[row.label])) for row in lines),
        caption=_caption(made, lines),
        about=tuple(notes.about(column) for column in made),
        notes=notes.merged(remarks),
        facts=tuple(facts),
    )


def estimates(column: Column, lines: Sequence[Row]) -> tuple[dict[str, Estimate], dict[str, list[Incomplete]]]:
    """Accuracy in per cent of each label that has a complete seed, and the seeds that are not."""
    found, cut = {}, {}
    for row in lines:
        value, missing = estimate(column.of(row.label), lambda record: 100 * record.accuracy, column.episodes)
        if value:
            found[row.label] = value
        if missing:
            cut[row.label] = missing
    return found, cut


def printed(column: Column, row: Row) -> paper.Published:
    """The paper's number, for methods as they are: under another label, a method has other options.

    None for corruptions that the paper does not have.
    """
    names = column.first.corruptions.get("names") or corruptions.NAMES
    if row.label != row.method or set(names).isdisjoint(corruptions.NAMES):
        return None
    return paper.published(column.dataset, column.protocol, column.mode, row.method)


def _ranks(lines: Sequence[Row], values: dict[str, float]) -> dict[str, str]:
    rivals = {row.label for row in lines if not row.is_reference}
    return ranks({label: value for label, value in values.items() if label in rivals})


def _caption(made: list[Column], lines: list[Row]) -> str:
    parts = ["Mean ± standard deviation over seeds."]
    if any(len(column.episodes) > 1 for column in made):
        parts.append("Where a protocol has several episodes, their mean is taken first.")
    parts.append("Best in bold, second-best underlined.")
    if any(row.method == "tent" for row in lines):
        parts.append("Tent keeps no running statistics: it normalises with the batch that it answers.")
    references = [row.label for row in lines if row.is_reference]
    if references:
        parts.append(f"Not ranked, because source data is needed while adapting: {', '.join(references)}.")
    return " ".join(parts)
