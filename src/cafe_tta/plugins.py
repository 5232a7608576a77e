"""Objects of the user's own code by name: `package.module:name`, or `file.py:name`, seen from the current folder."""

import importlib
import importlib.util
import re
import sys
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
    return importlib.util.find_spec(match[1].partition(".")[0]) is not None


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
