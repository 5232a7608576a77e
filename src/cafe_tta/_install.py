"""How to install what is missing: by the names of the packages, which works however this one was installed."""

import re
from importlib.metadata import PackageNotFoundError, requires


def missing(what: str, error: ModuleNotFoundError, extra: str) -> ImportError:
    """The error for a library that `what` needs, with the command that installs it and the rest of its extra."""
    return ImportError(f"{what} needs {error.name}, which is not installed; install it with: {command(extra)}")


def command(extra: str) -> str:
    """The command that installs the libraries of an extra.

    >>> command("models").startswith('pip install "timm')
    True
    """
    return " ".join(["pip install", *(f'"{library}"' for library in libraries(extra))])


def libraries(extra: str) -> list[str]:
    """What an extra of this package consists of, as its metadata says, which has other extras in it already."""
    try:
        declared = requires("cafe-tta") or []
    except PackageNotFoundError:  # run from its sources alone
        return [f"cafe-tta[{extra}]"]
    found: list[str] = []
    for text in declared:
        library, _, condition = (part.strip() for part in text.partition(";"))
        if re.search(rf"""extra\s*==\s*["']{extra}["']""", condition):
            found.append(library)
    return found
