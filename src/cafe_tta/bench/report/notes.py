"""What a reader must know before comparing the numbers of a column: gaps, seeds, images, frost."""

from collections.abc import Iterable, Sequence
from typing import Any

from cafe_tta.bench import paper
from cafe_tta.bench.report.columns import Column, Row
from cafe_tta.bench.report.estimates import Estimate, Incomplete

Remark = tuple[str, str]  # the column, and what is to be said of it


def about(column: Column) -> str:
    """What a column is: images, episodes, seeds, model, corruptions."""
    first, episodes = column.first, len(column.episodes)
    images = " to ".join(f"{number:,}" for number in {column.images[0]: 0, column.images[-1]: 0})
    parts = [
        f"{images} images{f' in each of {episodes} episodes' if episodes > 1 else ''}",
        count(len(column.seeds), "seed"),
        " ".join(filter(None, [first.model.get("architecture"), short(first.model.get("weights"))])),
        f"data {short(first.data.get('digest'))}",
    ]
    if any(domain != "clean" for domain in column.domains) and first.corruptions:
        origin = "from the published files" if first.corruptions.get("official_files") else "generated"
        parts.append(f"corruptions {origin} (preset {first.corruptions.get('preset')})")
    return f"{column.name}: {', '.join(parts)}"


def gaps(
    column: Column, rows: Sequence[Row], seeds: dict[str, Estimate], cut: dict[str, list[Incomplete]]
) -> list[Remark]:
    """Methods, seeds and episodes that others in the column or in the table have."""
    notes = []
    missing = [row.label for row in rows if row.label not in seeds and row.label not in cut]
    if missing:
        notes.append((column.name, f"no runs of {', '.join(missing)}"))
    for label, parts in cut.items():
        for part in parts:
            episodes = f"{part.found} of {part.expected} episodes"
            notes.append((column.name, f"{label} with seed {part.seed} has only {episodes} and is left out"))
    most = max((len(estimate.seeds) for estimate in seeds.values()), default=0)
    fewer = [f"{label} {len(estimate.seeds)}" for label, estimate in seeds.items() if len(estimate.seeds) < most]
    if fewer:
        notes.append((column.name, f"{count(most, 'seed')}, but {', '.join(fewer)}"))
    return notes


def warnings(column: Column) -> list[Remark]:
    """Frost that is not the standard one, and steps that were refused."""
    notes = []
    if column.first.corruptions.get("frost_is_standard") is False and any("frost" in name for name in column.domains):
        notes.append((column.name, "frost was made with stand-in textures, not with the standard ones"))
    for label in dict.fromkeys(record.label for record in column.records):
        records = column.of(label)
        refused, steps = sum(record.refused for record in records), sum(record.steps for record in records)
        if refused:
            notes.append((column.name, f"{label} refused {count(refused, 'step')} and took {steps:,}"))
    return notes


def unlike_the_paper(column: Column) -> list[Remark]:
    """In what a column differs from the paper's, so that nobody compares the two without knowing."""
    setting = paper.SETTINGS.get(column.dataset)
    if setting is None or column.protocol not in ("separated", "severity-mixed", "all-mixed", "clean"):
        return []
    differences = []
    model = column.first.model.get("architecture")
    if model != setting.model:
        differences.append(f"{model} instead of {setting.model}")
    if column.images != [setting.images]:
        differences.append(f"{column.images[0]:,} images instead of {setting.images:,}")
    if column.protocol != "clean":
        expected = setting.corruptions * len(setting.severities)
        severities = sorted({domain.rpartition("-")[2] for domain in column.domains})
        if len(column.domains) != expected or severities != [str(severity) for severity in setting.severities]:
            ours = f"{count(len(column.domains), 'domain')} of severity {', '.join(severities)}"
            differences.append(f"{ours} instead of {expected} of severity {', '.join(map(str, setting.severities))}")
        if not column.first.corruptions.get("official_files"):
            differences.append("generated corruptions instead of the published files")
    return [(column.name, f"unlike the paper's: {'; '.join(differences)}")] if differences else []


def merged(remarks: Iterable[Remark]) -> tuple[str, ...]:
    """What is true of several columns is said once.

    >>> merged([("a", "frost is odd"), ("b", "frost is odd"), ("b", "no runs of x")])
    ('a, b: frost is odd', 'b: no runs of x')
    """
    subjects: dict[str, list[str]] = {}
    for subject, text in remarks:
        subjects.setdefault(text, []).append(subject)
    return tuple(f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in subjects.items())


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "seed"), count(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(digest: Any) -> str:
    """The beginning of a hash, or a name as it is."""
    text = "unknown" if digest is None else str(digest)
    return text[:10] if len(text) >= 16 and all(letter in "0123456789abcdef" for letter in text) else text
