"""A leaderboard: every method in every setting of many folders of records, on one static page that can be sorted."""

import base64
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from cafe_tta import storage
from cafe_tta.bench.records import RECORDS, Record, files, read
from cafe_tta.bench.report.columns import Column, Estimate, accuracy, corruptions_of, estimate, natural, rows
from cafe_tta.bench.report.page import document
from cafe_tta.bench.report.tables import (
    NOTHING,
    Cost,
    calibration_error,
    code_text,
    cost,
    count,
    short,
    worst_corruption,
)

HEADS = (
    "method", "accuracy %", "seeds", "batch", "data", "stream", "mode", "model", "images", "ECE %",
    "worst corruption %", "forward", "backward", "ms / image", "memory MB", "needs", "code", "records",
)  # fmt: skip
_TEXTS = {"method", "data", "stream", "mode", "model", "needs", "code", "records"}  # the others are sorted as numbers
_OF_SETTING = {"data", "stream", "mode", "model", "images"}  # hidden while one setting is chosen, which says the same
_SCRIPT = """
const body = document.querySelector("tbody"), chosen = document.querySelector("select");
chosen.onchange = () => {
  for (const row of body.rows) row.hidden = chosen.value && row.dataset.setting !== chosen.value;
  body.parentElement.classList.toggle("one", chosen.value !== "");
  history.replaceState(null, "", "#" + (chosen.value || "all"));
};
if (location.hash) chosen.value = location.hash.slice(1);
if (chosen.selectedIndex < 0) chosen.value = "";
chosen.onchange();
document.querySelectorAll("thead button").forEach((button, column) => { button.onclick = () => {
  const head = button.parentElement, up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => row.cells[column].dataset.value, number = head.dataset.kind === "number";
  const compare = (a, b) => number ? a - b : a.localeCompare(b, undefined, {numeric: true});
  const rows = [...body.rows].filter(row => value(row) !== ""), empty = [...body.rows].filter(row => value(row) === "");
  rows.sort((a, b) => (up ? 1 : -1) * compare(value(a), value(b)));
  body.append(...rows, ...empty);
}; });
"""
_STYLE = """
thead button { all: unset; cursor: pointer; font-weight: 600; }
thead button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
select { font: inherit; max-width: 100%; margin: .6rem 0 1rem; }
.one .setting { display: none; }
body { max-width: none; }
tbody td.text { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; max-width: 20rem; }
td code { overflow-wrap: anywhere; white-space: normal; display: block; min-width: 20rem; }
"""


@dataclass(frozen=True)
class Setting:
    """What accuracies must have in common to be compared, in words."""

    data: str
    stream: str
    mode: str
    model: str
    images: int  # of an episode
    key: str  # a hash of all of it, also of what the words leave out

    @property
    def text(self) -> str:
        return f"{self.data}: {self.stream}, {self.mode}, {self.model}, {self.images:,} images"


@dataclass(frozen=True)
class Entry:
    """A line: a method in a setting, of one folder."""

    setting: Setting
    label: str
    needs: str | None
    accuracy: Estimate
    rank: str
    calibration_error: Estimate | None
    worst: tuple[str, Estimate] | None
    cost: Cost
    batch_size: int | None
    code: str
    file: Path
    command: str


def entries(paths: Sequence[str | Path]) -> list[Entry]:
    """The lines of the leaderboard, by setting, best first. Rows that lack episodes of their setting are left out."""
    settings: dict[str, list[tuple[Path, Record]]] = defaultdict(list)
    for file in files(_folders(paths)):
        for record in read(file):
            settings[_setting_key(record)].append((file, record))
    if not settings:
        raise ValueError(f"no finished run in {', '.join(map(str, paths))}; let the benchmark finish at least one")
    found = [entry for group in settings.values() for entry in _of_setting(group)]
    return sorted(found, key=lambda entry: (natural(entry.setting.text), -entry.accuracy.mean, natural(entry.label)))


def _folders(paths: Iterable[str | Path]) -> list[Path]:
    """A folder of folders of records stands for these."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob(f"*/{RECORDS}"))
        found += inside if inside and not (path / RECORDS).exists() else [path]
    return found


def to_html(lines: Sequence[Entry], output: Path) -> str:
    """The page, with links to the records as they are seen from `output`."""
    settings: Counter[Setting] = Counter()  # runs
    for entry in lines:
        settings[entry.setting] += len(entry.accuracy.seeds)
    largest = max(settings, key=settings.__getitem__)
    choices = "".join(
        f'<option value="{setting.key}"{" selected" * (setting == largest)}>{escape(setting.text)}</option>'
        for setting in settings
    )
    heads = "".join(
        f'<th scope="col" class="stub{" setting" * (head in _OF_SETTING)}"'
        f' data-kind="{"text" if head in _TEXTS else "number"}"><button type="button">{escape(head)}</button></th>'
        for head in HEADS
    )
    rows = "\n".join(_row(entry, output.parent) for entry in lines)
    body = [
        "<h1>Test-time adaptation: leaderboard</h1>",
        f'<p class="soft">{count(len(lines), "line")} in {count(len(settings), "setting")}. '
        "Accuracies can be compared within a setting only: the same images, corruptions, weights and preprocessing. "
        "± is the sample standard deviation over seeds. Best of a setting in bold. A click on a heading sorts; "
        "the address of the page keeps the chosen setting.</p>",
        f'<label>Setting <select><option value="">all</option>{choices}</select></label>',
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>',
        f"<script>{_SCRIPT}</script>",
    ]
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return document("Test-time adaptation: leaderboard", body, f"; script-src 'sha256-{digest}'", _STYLE)


def write(paths: Sequence[str | Path], output: str | Path) -> Path:
    """Writes the page to the file `output`."""
    output = Path(output)
    if output.is_dir() or output.suffix != ".html":
        raise ValueError(f"expected `output` to be a file that ends in .html, but got {output}")
    storage.write_bytes(output, to_html(entries(paths), output).encode())
    return output


def _setting_key(record: Record) -> str:
    """What must be the same for two accuracies to be comparable."""
    stream = (record.dataset, record.stream_name, record.pace.get("setting"), record.mode, record.limit, record.copies)
    images = (record.data.get("digest"), record.corruptions)
    return json.dumps([stream, images, record.model], sort_keys=True)


def _of_setting(group: Sequence[tuple[Path, Record]]) -> list[Entry]:
    column = _column([record for _, record in group])
    own: dict[tuple[Path, str], list[Record]] = defaultdict(list)
    for file, record in group:
        own[file, record.label].append(record)
    means = {key: estimate(records, accuracy, column.episodes)[0] for key, records in own.items()}
    complete = {key: mean for key, mean in means.items() if mean is not None}
    rivals = {key: round(mean.mean, 2) for key, mean in complete.items() if not rows(own[key])[0].is_reference}
    best = {key for key, mean in rivals.items() if mean == max(rivals.values())} if len(rivals) > 1 else set()
    setting = _describe(column)
    return [_entry(setting, file, own[file, label], mean, best, column) for (file, label), mean in complete.items()]


def _column(records: Sequence[Record]) -> Column:
    """The records of a setting, checked: the same seed has dealt the same images everywhere."""
    first = records[0]
    dealt: dict[tuple[str, int], Record] = {}
    for record in records:
        other = dealt.setdefault((record.episode.name, record.seed), record)
        if other.episode.digest != record.episode.digest:
            raise ValueError(
                f"{other.origin} and {record.origin} have the same settings and seed, but other images "
                f"({other.episode.digest} and {record.episode.digest}); leave one of them out"
            )
    return Column(first.dataset, first.stream_name, first.mode, tuple(records))


def _entry(
    setting: Setting, file: Path, records: Sequence[Record], mean: Estimate, best: set[tuple[Path, str]], column: Column
) -> Entry:
    (row,) = rows(records)
    last = max(records, key=lambda record: record.finished)
    return Entry(
        setting,
        row.label,
        row.needs,
        mean,
        "best" if (file, row.label) in best else "",
        estimate(records, calibration_error, column.episodes)[0],
        worst_corruption(Column(column.dataset, column.protocol, column.mode, tuple(records)), row),
        cost(records),
        last.config.get("batch_size"),
        _code(records),
        file,
        last.command,
    )


def _describe(column: Column) -> Setting:
    first, episodes, names = column.first, len(column.episodes), corruptions_of(column)
    facts = []
    if names != ["clean"]:
        origin = "published" if first.corruptions.get("official_files") else "generated"
        severities = ", ".join(map(str, first.corruptions.get("severities") or ())) or "unknown"
        facts.append(f"{count(len(names), f'{origin} corruption')}, severity {severities}")
    facts += [f"{episodes} episodes"] if episodes > 1 else []
    return Setting(
        data=f"{column.dataset} ({Path(str(first.data.get('name'))).name} {short(first.data.get('digest'))})",
        stream=f"{column.protocol} ({'; '.join(facts)})" if facts else column.protocol,
        mode=column.mode,
        model=f"{first.model.get('architecture')} {short(first.model.get('weights'))}",
        images=column.images[-1],
        key=hashlib.sha256(_setting_key(first).encode()).hexdigest()[:12],
    )


def _code(records: Iterable[Record]) -> str:
    """Commits of the code that made the runs."""
    return ", ".join(dict.fromkeys(code_text(record) for record in records if record.code.get("commit")))


def _row(entry: Entry, folder: Path) -> str:
    worst, spent = entry.worst, entry.cost
    cells = [
        _text(entry.label),
        _number(entry.accuracy.mean, entry.accuracy.text(), entry.rank),
        _number(len(entry.accuracy.seeds), str(len(entry.accuracy.seeds))),
        _number(entry.batch_size, str(entry.batch_size or "")),
        *(
            _text(text, "setting")
            for text in (entry.setting.data, entry.setting.stream, entry.setting.mode, entry.setting.model)
        ),
        _number(entry.setting.images, f"{entry.setting.images:,}", kind="setting"),
        _estimate(entry.calibration_error),
        _estimate(worst[1], f" ({worst[0]})") if worst else _number(None, ""),
        *(_number(value, f"{value:.2f}" if value is not None else "") for value in (spent.forward, spent.backward)),
        _number(spent.milliseconds_per_image, f"{spent.milliseconds_per_image:.2f}"),
        _number(spent.run_memory_mb, f"{spent.run_memory_mb:,.0f}" if spent.run_memory_mb is not None else ""),
        _text(entry.needs or "nothing"),
        _text(entry.code),
        _records(entry, folder),
    ]
    return f'<tr data-setting="{entry.setting.key}">{"".join(cells)}</tr>'


def _records(entry: Entry, folder: Path) -> str:
    """A link to the file of records, and the command that made them."""
    link = quote(os.path.relpath(entry.file, folder).replace(os.sep, "/"))
    name, command = escape(entry.file.parent.name), escape(entry.command) or "The command was not recorded."
    return (
        f'<td class="text" data-value="{name}"><a href="{link}">{name}</a>'
        f"<details><summary>command</summary><code>{command}</code></details></td>"
    )


def _text(text: str, kind: str = "") -> str:
    return (
        f'<td class="{f"text {kind}".strip()}" data-value="{escape(text, quote=True)}">{escape(text) or NOTHING}</td>'
    )


def _number(value: float | None, text: str, rank: str = "", kind: str = "") -> str:
    shown = f"<strong>{escape(text)}</strong>" if rank else escape(text) or NOTHING
    return f'<td class="{kind}" data-value="{"" if value is None else value}">{shown}</td>'


def _estimate(value: Estimate | None, suffix: str = "") -> str:
    return _number(None, "") if value is None else _number(value.mean, value.text() + suffix)
