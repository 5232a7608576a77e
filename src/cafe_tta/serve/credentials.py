"""Tokens of cameras: a file that binds the name of a camera to whoever has its token; read again when it changes."""

import hashlib
import hmac
import logging
import re
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cafe_tta.serve.cameras import check_name

log = logging.getLogger(__name__)

LOOK_EVERY = 1.0  # seconds between two looks at the file
MOST_BYTES = 16 * 2**20  # of the file
TOKEN = r"[!-~]{8,1000}"


class Credentials:
    """The tokens of a file, by camera. Any thread may ask; a file that has become unreadable changes nothing.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "cameras.toml"
    >>> _ = path.write_text('gate-1 = "correct-horse"')
    >>> cameras = Credentials(path)
    >>> cameras.knows("gate-1"), cameras.fits("gate-1", "correct-horse"), cameras.fits("gate-1", "battery-staple")
    (True, True, False)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _look(path)
        self._digests = read_tokens(path)
        self._next_look = time.monotonic() + LOOK_EVERY

    def __len__(self) -> int:
        return len(self._digests)

    def knows(self, camera: str) -> bool:
        """Whether the camera has a token."""
        self._read_again()
        return camera in self._digests

    def fits(self, camera: str, token: str) -> bool:
        """Whether this is a token of that camera; takes the same time wherever it differs."""
        given = _digest(token)
        return any([hmac.compare_digest(given, known) for known in self._digests.get(camera, ())])

    def _read_again(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        seen = _look(self.path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._digests = read_tokens(self.path)
        except (ValueError, OSError) as error:
            log.error("the tokens of cameras stay as they were: %s", error)
        else:
            log.info("the tokens of %d cameras were read again", len(self._digests))


def read_tokens(path: Path) -> Mapping[str, tuple[bytes, ...]]:
    """Digests of the tokens of each camera; raises ValueError where the file is not one."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read the tokens of cameras: {path}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ValueError(f"expected {path} to have at most {MOST_BYTES} bytes")
    try:
        values = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    return {name: _digests(path, name, value) for name, value in values.items()}


def _digests(path: Path, name: str, value: Any) -> tuple[bytes, ...]:
    check_name(name)
    tokens = value if isinstance(value, list) else [value]
    if not tokens or not all(isinstance(token, str) and re.fullmatch(TOKEN, token) for token in tokens):
        raise ValueError(  # a token appears in no text
            f"expected {name!r} in {path} to be a token of at least 8 printable characters without spaces, or a list "
            "of such tokens"
        )
    return tuple(_digest(token) for token in tokens)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _look(path: Path) -> tuple[int, ...]:
    """What changes when the file does."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
