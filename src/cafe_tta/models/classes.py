"""Names of classes, from a file."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_classes(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of classes 0, 1, …: the lines of a text file, or a JSON list, or a JSON object of numbers and names.

    An object may be {"0": "cat"}, {"cat": 0}, or {"0": ["n02123045", "cat"]}, whose last entry is the name.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected the names of the classes, one per line, or as JSON")
    try:
        text = path.read_text(encoding="utf-8-sig")
        names = _from_json(json.loads(text)) if path.suffix.lower() == ".json" else text.splitlines()
    except (ValueError, TypeError) as error:  # also of UnicodeDecodeError and JSONDecodeError
        raise ValueError(
            f"{path}: expected the names of the classes, one per line, or a JSON list of them, or a JSON object like "
            f'{{"0": "cat", "1": "dog"}} ({error})'
        ) from None
    names = [name.strip() for name in names]
    while names and not names[-1]:
        names.pop()
    if not names or not all(names):
        line = names.index("") + 1 if names else 1
        raise ValueError(f"{path}: expected a name for every class, but line {line} is empty")
    return tuple(names)


def check_classes(classes: Sequence[str], num_classes: int, origin: str) -> tuple[str, ...]:
    """Refuses names for another number of classes than the model has."""
    if len(classes) != num_classes:
        raise ValueError(f"{origin} names {len(classes)} classes, but the model tells {num_classes} apart")
    return tuple(classes)


def _from_json(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        if not all(str(key).isdecimal() for key in value):
            value = {number: name for name, number in value.items()}
        numbers = {int(key): name for key, name in value.items()}
        if sorted(numbers) != list(range(len(value))):
            raise ValueError(f"its numbers are not 0 to {len(value) - 1}, each once")
        value = [numbers[number] for number in range(len(numbers))]
    if not isinstance(value, list):
        raise ValueError(f"it is a {type(value).__name__}")
    names = [entry[-1] if isinstance(entry, list) and entry else entry for entry in value]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("its names are not texts")
    return names
