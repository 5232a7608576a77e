"""Methods, data sets, corruptions, protocols and models from outside this package.

A name is looked up among the entry points of installed packages, in the groups `cafe_tta.methods`, `.datasets`,
`.corruptions` and `.protocols`; `package.module:name` and `file.py:name` are looked up from the current folder.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, MutableMapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from cafe_tta.options import did_you_mean

HOW = "package.module:name, importable from the current folder, or file.py:name"
_SPEC = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")


def is_spec(text: str) -> bool:
    """Whether a text looks like the name of an object in a module.

    >>> is_spec("nets:build"), is_spec("my/nets.py:build"), is_spec("resnet18"), is_spec("digits:")
    (True, True, False, False)
    """
    return _SPEC.fullmatch(text) is not None


def exists(text: str) -> bool:
    """Whether the module of such a name can be found; it is not imported."""
    match = _SPEC.fullmatch(text)
    if match is None:
        return False
    if match[1].endswith(".py"):
        return Path(match[1]).is_file()
    _see_folder(Path.cwd())
    try:
        return importlib.util.find_spec(match[1].partition(".")[0]) is not None
    except ValueError:  # of __main__, which no name can be taken from
        return False


def load_object(text: str) -> Any:
    """What a module calls by a name. The module is imported: its code is executed.

    >>> load_object("math:tau")
    6.283185307179586
    >>> load_object("math:tua")
    Traceback (most recent call last):
    ValueError: math has no 'tua'; did you mean 'tau'?
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"expected {HOW}, but got {text!r}")
    found: Any = _module(match[1])
    for name in match[2].split("."):
        if not hasattr(found, name):
            raise ValueError(f"{match[1]} has no {match[2]!r}{did_you_mean(name, dir(found))}")
        found = getattr(found, name)
    return found


def find(kind: str, text: str) -> Any:
    """What an installed package or the user's own code calls so; None where there is nothing of that name."""
    for entry in entry_points(group=f"cafe_tta.{kind}", name=text):
        try:
            return entry.load()
        except Exception as error:  # whatever their code does
            package = entry.dist.name if entry.dist else "an installed package"
            raise ImportError(f"{text}, of {package}, cannot be loaded: {type(error).__name__}: {error}") from error
    return load_object(text) if exists(text) else None


def add(kind: str, text: str, known: MutableMapping[str, Any], take: Callable[[str, Any], Any]) -> str | None:
    """The key of `known` that a text stands for; what it finds outside is added, and None is nothing found.

    `take` is given the name and the object, and makes the value of it, or raises where it is of another kind, or
    returns None where it is for others. The key is the entry point's name, or the `name` of the value, or else what is
    written after the colon.
    """
    if text in known:
        return text
    if (key := _KEYS.get((kind, text))) in known:
        return key
    found = find(kind, text)
    if found is None:
        return None
    last = text.rpartition(":")[2].rpartition(".")[2]
    value = take(last, found)
    if value is None:
        return None
    key = (getattr(value, "name", None) or last) if is_spec(text) else text
    if key in known and known[key] is not value:
        key = text  # that name is taken
    known[key] = value
    _KEYS[kind, text] = key
    return key


def unknown(what: str, kind: str, text: str, known: Iterable[str]) -> ValueError:
    """The error for a name that nothing has."""
    names = [*known, *available(kind)]
    hint, choices = did_you_mean(text, names), ", ".join(names)
    return ValueError(f"unknown {what} {text!r}{hint}; choose from: {choices}; one of your own is {HOW}")


def added(kind: str) -> list[str]:
    """The texts by which this process has found something outside: another process can find it by them, too."""
    return [text for own, text in _KEYS if own == kind]


def available(kind: str) -> list[str]:
    """The names that installed packages offer."""
    return sorted(entry.name for entry in entry_points(group=f"cafe_tta.{kind}"))


_KEYS: dict[tuple[str, str], str] = {}  # of what was added


def _module(name: str) -> ModuleType:
    file = Path(name).absolute() if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"no file at {name}; expected {HOW}")
    _see_folder(Path.cwd() if file is None else file.parent)
    module = name if file is None else file.stem
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module + ".").startswith(error.name + "."):
            raise ValueError(f"no module {error.name!r} can be imported from here; expected {HOW}") from error
        raise ImportError(f"importing {name} failed: {error}") from error
    except Exception as error:  # whatever the user's code does
        raise ImportError(f"importing {name} failed: {type(error).__name__}: {error}") from error
    if file is not None and Path(loaded.__file__ or "").resolve() != file.resolve():
        raise ValueError(f"{name}: there is another module {module!r} already ({loaded.__file__}); rename the file")
    return loaded


def _see_folder(folder: Path) -> None:
    """Makes the modules of a folder importable, as `python -m` does with the current one."""
    if str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.insert(0, str(folder))
