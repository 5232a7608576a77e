"""What was run, and with which choices: everything besides the numbers that decides the numbers."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from cafe_tta.bench.report.columns import MODES, natural, rows
from cafe_tta.bench.report.notes import count, short
from cafe_tta.bench.report.records import Record

Lines = list[tuple[str, ...]]

CHOICES_HEAD = ("method", "data", "mode", "answer", "batch", "k", "other options")


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
    facts += [("corruptions", text) for text in _distinct(_plain(record.corruptions) for record in records)]
    facts += [("source statistics", text) for text in _distinct(_source(record) for record in records)]
    facts += [("versions", text) for text in _distinct(_plain(record.versions) for record in records)]
    facts += [("machine", text) for text in _distinct(_plain(record.machine) for record in records)]
    facts += [("command", text) for text in _distinct(record.command for record in records)]
    if dates:
        facts.append(("finished", dates[0] if dates[0] == dates[-1] else f"from {dates[0]} to {dates[-1]}"))
    return facts


def choices(records: Sequence[Record]) -> Lines:
    """One line for each method, data set and mode, with its options."""
    lines: Lines = []
    for row in rows(records):
        own = [record for record in records if (record.label, record.method) == (row.label, row.method)]
        found: dict[tuple[str, str], dict[tuple[str, ...], None]] = {}
        for record in own:
            found.setdefault((record.dataset, record.mode), {})[_options(record)] = None
        for dataset, mode in sorted(
            found, key=lambda key: (natural(key[0]), MODES.index(key[1]) if key[1] in MODES else 9)
        ):
            lines += [(row.label, dataset, mode, *options) for options in sorted(found[dataset, mode])]
    return lines


def _options(record: Record) -> tuple[str, ...]:
    config = dict(record.config)
    known = [_value(config.pop(key, None)) for key in ("answer", "batch_size")]
    groups = _value(record.num_groups) if record.needs == "stats" else ""
    return (*known, groups, _plain(config))


def _model(record: Record) -> str:
    facts = {key: value for key, value in record.model.items() if key not in ("architecture", "weights")}
    name, weights = record.model.get("architecture", "unknown"), short(record.model.get("weights"))
    return f"{record.dataset}: {name}, weights {weights}, {_plain(facts)}"


def _data(record: Record) -> str:
    facts = {key: value for key, value in record.data.items() if key not in ("name", "digest")}
    return f"{record.data.get('name', record.dataset)}, digest {short(record.data.get('digest'))}, {_plain(facts)}"


def _source(record: Record) -> str:
    sizes = record.source.get("group_sizes") or ()
    facts = {key: value for key, value in record.source.items() if key not in ("group_sizes", "data")}
    text = _plain(facts)
    if sizes:
        text += f", group sizes {min(sizes)} to {max(sizes)}"
    return f"{short(record.source.get('data'))}: {text}" if record.source else ""


def _plain(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in sorted(facts.items()))


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _distinct(texts: Iterable[str]) -> list[str]:
    return sorted(set(filter(None, texts)), key=natural)
