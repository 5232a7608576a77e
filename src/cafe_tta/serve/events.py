"""Events: what happened to the served model. They are shown on the page, kept with the state and written to the log."""

import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from cafe_tta.options import Options, describe, option
from cafe_tta.serve.cameras import finite

log = logging.getLogger(__name__)
request_id: ContextVar[str] = ContextVar("request_id", default="-")  # of the request that is being answered

EVENTS = 200  # that are kept
MOST_VERSION = 10**12  # of a snapshot: a thousand steps a second for thirty years
SHOWN_CAMERAS = 32  # of a step, by name
OTHERS = "(others)"
LOGGED_REQUESTS = 8  # of a step, by id
FIGURES = ("alignment", "frechet", "entropy", "loss")
_WARNINGS = ("warning", "refused", "rolled_back", "quarantined", "stalled", "undone", "leader_lost")
_LEVELS = dict.fromkeys(_WARNINGS, logging.WARNING) | {"error": logging.ERROR}
_REPLACED = ("skipped", "saved")  # where the event before is of the same kind
_NAME = r"[^\s/\\'\":;,()]+"  # of a file or a folder, or a part of it between spaces
_FOLDERS = re.compile(rf"(?<![\w.:/])(?:/|[A-Za-z]:\\)(?:{_NAME}(?: {_NAME}){{0,3}}[/\\])+(?={_NAME})")


@dataclass(frozen=True)
class Event(Options):
    """Something that happened, in words and figures; written to disk and read again as declared here."""

    id: int = option(None, "Its number.", least=1)
    time: float = option(None, "When it happened, in seconds since 1970.", least=0)
    kind: str = option(None, "What it is, in a word.", pattern=(r"[a-z_]{1,40}", "a word"))
    version: int = option(None, "Of the snapshot that answered afterwards.", least=0, most=MOST_VERSION)
    text: str = option(None, "What happened.", pattern=(r".{0,4000}", "a text of at most 4000 characters"))
    request: str = option("-", "Id of the request that caused it.", pattern=(r"[\w.:-]{1,64}", "an id"))
    alignment: float | None = option(None, "Alignment loss on the validation images.")
    frechet: float | None = option(None, "Fréchet distance to the source.")
    entropy: float | None = option(None, "Entropy of the answers.")
    loss: float | None = option(None, "Loss of the step.")
    cameras: dict[str, int] | None = option(None, "Images of each camera that a step was taken on, the most first.")


def from_json(kind: type[Any], content: Any, what: str) -> Any:
    """An `Options` value from parsed JSON, checked by its own declaration; names that it does not know are ignored.

    >>> from_json(Event, {"id": 1, "time": 0.0, "kind": "saved", "version": "x", "text": ""}, "an event")
    Traceback (most recent call last):
    ValueError: expected `version` to be a whole number, but got 'x'
    """
    if not isinstance(content, dict):
        raise ValueError(f"expected {what} to be a table of names and values, but got {type(content).__name__}")
    return kind(
        **{described.name: content[described.name] for described in describe(kind) if described.name in content}
    )


class Events:
    """The last events. Not thread-safe: the service holds its lock."""

    def __init__(self, model: str) -> None:
        self._model = model  # in the log
        self._events: deque[Event] = deque(maxlen=EVENTS)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def extend(self, events: Iterable[Event]) -> None:
        self._events.extend(events)

    def record(
        self,
        kind: str,
        version: int,
        text: str,
        figures: Mapping[str, float | None] | None = None,
        cameras: Mapping[str, int] | None = None,
        requests: Iterable[str] = (),
    ) -> None:
        """Notes an event, and logs it. A skipped step or a save replaces the event before it, if that is one too.

        `cameras` and `requests` are what a step was taken on; the log has the ids of the last few requests.
        """
        last = self._events[-1] if self._events else None
        if last is not None and kind in _REPLACED and last.kind == kind:
            self._events.pop()
        number = 1 if last is None else last.id + 1
        known = {name: finite((figures or {}).get(name)) for name in FIGURES}
        said, by = names_only(text)[:4000], request_id.get()
        event = Event(number, time.time(), kind, version, said, by, **known, cameras=_largest(cameras))
        self._events.append(event)
        measured = {name: value for name, value in known.items() if value is not None}
        fields: dict[str, Any] = {"event": kind, "model": self._model, "version": version} | measured
        if event.cameras:
            fields |= {"cameras": event.cameras, "requests": list(dict.fromkeys(requests))[-LOGGED_REQUESTS:]}
        log.log(_LEVELS.get(kind, logging.INFO), "%s: %s", kind, text, extra={"fields": fields})

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self._events]


def _largest(cameras: Mapping[str, int] | None) -> dict[str, int] | None:
    """The cameras with the most images; the others are counted together."""
    if not cameras:
        return None
    ranked = sorted(cameras.items(), key=lambda pair: (-pair[1], pair[0]))
    rest = sum(count for _, count in ranked[SHOWN_CAMERAS:])
    return dict(ranked[:SHOWN_CAMERAS]) | ({OTHERS: rest} if rest else {})


def names_only(text: str) -> str:
    """The text with the folders of absolute paths left out: clients need not know where things are on the host.

    >>> names_only("cannot read /srv/my state/snapshot-1.safetensors: no such file; 3/4 are read")
    'cannot read snapshot-1.safetensors: no such file; 3/4 are read'
    """
    return _FOLDERS.sub("", text)
