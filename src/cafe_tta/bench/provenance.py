"""Where a number comes from: code, packages, machine and command line."""

import hashlib
import inspect
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cafe_tta._version import __version__

PACKAGE = Path(__file__).parents[1]
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "opencv-python-headless", "timm", "torchvision")


@cache  # at the first call: the code that runs is the code that was imported, whatever happens to the files later
def code() -> dict[str, Any]:
    """The commit that this package is at, and whether its files differ from it; None outside a git checkout."""
    return code_of(PACKAGE)


def code_of(folder: Path) -> dict[str, Any]:
    """The commit of a package in `folder`, and whether files in it were changed, added or removed since."""
    # A package that is installed somewhere inside another project's checkout is not at that project's commit.
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    commit = None if tracked is None else _git(folder, "rev-parse", "HEAD")
    changed = None if commit is None else _git(folder, "status", "--porcelain", "--", ".")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def method_digest(method: type) -> str | None:
    """A hash of the file that a method from outside this package is written in; None for our own, and without a file.

    >>> method_digest(int) is None
    True
    """
    try:
        path = Path(inspect.getsourcefile(method) or "")
    except TypeError:  # built in
        return None
    outside = path.is_file() and PACKAGE not in path.resolve().parents
    return file_digest(path.resolve()) if outside else None


@cache  # as `code`
def file_digest(path: Path) -> str:
    """A hash of a file as it was when this process first asked."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of this package, Python, and the packages that decide numbers."""
    found = {"cafe_tta": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine() -> dict[str, Any]:
    return {"processor": _processor(), "threads": torch.get_num_threads()}


def command() -> str:
    """The command line of this process."""
    program = Path(sys.argv[0]).name
    return shlex.join(["cafe-tta" if program == "__main__.py" else program, *sys.argv[1:]])


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, no checkout, or an error."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
