"""One HTML page with everything: no script, nothing loaded from elsewhere, every text escaped."""

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby, takewhile
from typing import Any
from urllib.parse import quote

from cafe_tta.bench.experiments import MODES
from cafe_tta.bench.records import Record
from cafe_tta.bench.report.columns import natural, rank, rows
from cafe_tta.bench.report.figures import Drawing
from cafe_tta.bench.report.tables import Cell, Table, code_text, count, short

Lines = list[tuple[str, ...]]

OPTIONS_HEAD = ("method", "data", "mode", "answer", "batch", "k", "other options")
PIXELS_PER_INCH = 115
_CSS = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5a6570; --page: #fff; --line: #d8dee4; --shade: #f4f6f8;
  --accent: #0072b2; --paper: #6b5a2e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #a0aab4; --page: #14181c; --line: #343c44;
  --shade: #1c2228; --accent: #6cc0f0; --paper: #d9c48a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem clamp(.9rem, 4vw, 3rem) 4rem; max-width: 78rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, ul { max-width: 70ch; }
a { color: var(--accent); }
nav a { display: inline-block; margin: .15rem 1rem .15rem 0; }
.soft, .about, figcaption { color: var(--soft); font-size: .88rem; }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .65rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom: 1px solid var(--line); background: var(--shade); text-align: center; }
thead th.stub, tbody th, td.text { text-align: left; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th:first-child, thead th.first { position: sticky; left: 0; background: var(--page); font-weight: 600; }
thead th.first { background: var(--shade); }
tbody th + th { font-weight: 400; color: var(--soft); }
.edge { border-left: 1px solid var(--line); }
td.paper { color: var(--paper); }
td.wide { white-space: normal; min-width: 22rem; overflow-wrap: anywhere; text-align: left; }
ul.contents { columns: 26rem 2; column-gap: 2rem; padding-left: 1.2rem; max-width: none; }
ul.notes { padding: .6rem 1rem .6rem 2rem; background: var(--shade); border-left: 3px solid var(--accent);
  border-radius: 4px; font-size: .9rem; }
figure { margin: 1.5rem 0; }
summary { cursor: pointer; color: var(--accent); font-size: .95rem; max-width: 70ch; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .8rem; overflow-x: auto; }
@media (max-width: 640px) { .card img { max-width: 46rem; } body { font-size: 15px; } }
@media print { nav { display: none; } .scroll, .card { border: 0; } h2 { break-after: avoid; }
  figure { break-inside: avoid; } }
"""
# The page may load nothing, not even if a name in the records tried to make it.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_html(
    tables: Sequence[Table], drawings: Sequence[Drawing], records: Sequence[Record], notes: Sequence[str], command: str
) -> str:
    """The page of a report; `command` makes it again."""
    sections = [("tables", "Tables"), *([("figures", "Figures")] if drawings else []), ("run", "What was run")]
    sections += [("options", "Options")]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title in sections)
    run = what_was_run(records)
    body = [
        "<h1>Test-time adaptation: results</h1>",
        f'<p class="soft">{escape(run[0][1])}. Reproduce this page with <code>{escape(command)}</code></p>',
        f"<nav>{links}</nav>",
        _contents(tables),
        _notes(notes),
        '<h2 id="tables">Tables</h2>',
        *map(_table, tables),
        *(['<h2 id="figures">Figures</h2>', *_figures(drawings)] if drawings else []),
        '<h2 id="run">What was run</h2>',
        _plain((), run),
        '<h2 id="options">Options</h2>',
        "<p>The options of every method, as its runs recorded them. <code>answer</code> says whether a batch is "
        "answered by the model before or after the step that the batch caused.</p>",
        _plain(OPTIONS_HEAD, options_of(records)),
    ]
    return document("Test-time adaptation: results", body)


def document(title: str, body: Iterable[str], policy: str = "", style: str = "") -> str:
    """A page of its own: what `policy` does not add to the rules is not loaded or executed."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _contents(tables: Sequence[Table]) -> str:
    items = "".join(f'<li><a href="#table-{_id(table.name)}">{escape(table.title)}</a></li>' for table in tables)
    return f'<ul class="soft contents">{items}</ul>'


def _id(name: str) -> str:
    return quote(name, safe="")


def _table(table: Table) -> str:
    edges = table.boundaries() | {0}
    head = []
    for level in range(table.depth):
        stub = "".join(_stub_head(name, i, table.depth) for i, name in enumerate(table.stub)) if level == 0 else ""
        cells, start = "", 0
        for text, width in table.spans(level):
            below = table.heads[start][level + 1 :]
            empty = len(list(takewhile(lambda part: not part, below)))  # nothing below: the heading reaches down
            kind = ' class="edge"' if start in edges else ""
            if text:
                cells += f'<th scope="col" colspan="{width}" rowspan="{1 + empty}"{kind}>{escape(text)}</th>'
            start += width
        head.append(f"<tr>{stub}{cells}</tr>")
    lines = []
    for line in table.lines:
        stub = "".join(f'<th scope="row">{escape(text)}</th>' for text in line.head)
        cells = "".join(_cell(cell, table.heads[i][-1], i in edges) for i, cell in enumerate(line.cells))
        lines.append(f"<tr>{stub}{cells}</tr>")
    about = "".join(f"<li>{escape(text)}</li>" for text in table.about)
    if about:
        about = f"<details><summary>What the columns are</summary><ul>{about}</ul></details>"
    return (
        f'<h3 id="table-{_id(table.name)}">{escape(table.title)}</h3>\n<div class="scroll"><table>\n'
        f"<thead>{''.join(head)}</thead>\n<tbody>{''.join(lines)}</tbody>\n</table></div>\n"
        f'<p class="about">{escape(table.caption)}</p>\n<div class="about">{about}</div>\n{_notes(table.notes)}'
    )


def _stub_head(name: str, index: int, depth: int) -> str:
    kind = "stub first" if index == 0 else "stub"
    return f'<th scope="col" rowspan="{depth}" class="{kind}">{escape(name)}</th>'


def _cell(cell: Cell, head: str, edge: bool) -> str:
    text = escape(cell.text)
    text = {"best": f"<strong>{text}</strong>", "second": f"<u>{text}</u>"}.get(cell.rank, text)
    kinds = " ".join(name for name, wanted in (("paper", head == "paper"), ("edge", edge)) if wanted)
    return f'<td class="{kinds}">{text}</td>' if kinds else f"<td>{text}</td>"


def _figures(drawings: Sequence[Drawing]) -> Iterable[str]:
    """Two figures of a kind are shown; more of it can be opened."""
    for _, group in groupby(drawings, key=lambda drawing: drawing.name.partition("-")[0]):
        kind = list(group)
        yield from map(_figure, kind[:2])
        if kind[2:]:
            names = "; ".join(drawing.title.rpartition(": ")[2] for drawing in kind[2:])
            summary = f"{escape(kind[0].title.partition(': ')[0])}: {len(kind) - 2} more ({escape(names)})"
            yield f"<details><summary>{summary}</summary>{''.join(map(_figure, kind[2:]))}</details>"


def _figure(drawing: Drawing) -> str:
    # As an image, not as inline SVG: several inline ones would share the names of their glyphs.
    picture = base64.b64encode(drawing.svg).decode()
    title, caption = escape(drawing.title, quote=True), escape(drawing.caption)
    width = round(PIXELS_PER_INCH * drawing.width)
    return (
        f'<figure id="figure-{_id(drawing.name)}"><h3>{title}</h3>\n'
        f'<div class="card"><img alt="{title}" width="{width}" src="data:image/svg+xml;base64,{picture}"></div>\n'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _plain(heads: Sequence[str], lines: Lines) -> str:
    head = "".join(f'<th scope="col" class="stub">{escape(name)}</th>' for name in heads)
    body = ""
    for first, *rest in lines:
        kinds = ["text"] * (len(rest) - 1) + ["wide"]
        cells = "".join(f'<td class="{kind}">{escape(text)}</td>' for kind, text in zip(kinds, rest, strict=True))
        body += f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


# What was run, and with which options


def what_was_run(records: Sequence[Record]) -> Lines:
    """Names and values: models, data, corruptions, statistics, versions, machines, when."""
    dates = sorted(record.finished for record in records if record.finished)
    seeds = sorted({record.seed for record in records})
    facts: Lines = [
        ("runs", f"{len(records):,} runs finished, {count(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"),
        ("experiments", ", ".join(sorted({record.experiment for record in records}, key=natural))),
    ]
    facts += [("model", text) for text in _distinct(_model(record) for record in records)]
    facts += [("data", text) for text in _distinct(_data(record) for record in records)]
    facts += [("corruptions", text) for text in _distinct(_words(record.corruptions) for record in records)]
    facts += [("source statistics", text) for text in _distinct(_source(record) for record in records)]
    facts += [("code", text) for text in _distinct(code_text(r) for r in records if r.code.get("commit"))]
    facts += [("versions", text) for text in _distinct(_words(record.versions) for record in records)]
    facts += [("machine", text) for text in _distinct(_words(record.machine) for record in records)]
    facts += [("command", text) for text in _distinct(record.command for record in records)]
    if dates:
        facts.append(("finished", dates[0] if dates[0] == dates[-1] else f"from {dates[0]} to {dates[-1]}"))
    return facts


def options_of(records: Sequence[Record]) -> Lines:
    """One line for each method, data set and mode, with its options."""
    lines: Lines = []
    for row in rows(records):
        own = [record for record in records if (record.label, record.method) == (row.label, row.method)]
        used: dict[tuple[str, str], set[tuple[str, ...]]] = {}
        for record in own:
            used.setdefault((record.dataset, record.mode), set()).add(_options(record))
        for dataset, mode in sorted(used, key=lambda key: (natural(key[0]), rank(MODES, key[1]))):
            lines += [(row.label, dataset, mode, *options) for options in sorted(used[dataset, mode])]
    return lines


def _options(record: Record) -> tuple[str, ...]:
    config = dict(record.config)
    known = [_value(config.pop(key, None)) for key in ("answer", "batch_size")]
    groups = _value(record.num_groups) if record.needs == "stats" else ""
    return (*known, groups, _words(config))


def _model(record: Record) -> str:
    facts = {key: value for key, value in record.model.items() if key not in ("architecture", "weights")}
    name, weights = record.model.get("architecture", "unknown"), short(record.model.get("weights"))
    return f"{record.dataset}: {name}, weights {weights}, {_words(facts)}"


def _data(record: Record) -> str:
    facts = {key: value for key, value in record.data.items() if key not in ("name", "digest")}
    return f"{record.data.get('name', record.dataset)}, digest {short(record.data.get('digest'))}, {_words(facts)}"


def _source(record: Record) -> str:
    sizes = record.source.get("group_sizes") or ()
    facts = {key: value for key, value in record.source.items() if key not in ("group_sizes", "data")}
    text = _words(facts)
    if sizes:
        text += f", group sizes {min(sizes)} to {max(sizes)}"
    return f"{short(record.source.get('data'))}: {text}" if record.source else ""


def _words(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in sorted(facts.items()))


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _distinct(texts: Iterable[str]) -> list[str]:
    return sorted(set(filter(None, texts)), key=natural)
