"""What a leader and its followers tell each other: the leader's standing, its snapshot, and images to adapt to.

Over HTTP, since any of them may be killed at any moment: a process group of PyTorch ends with the first of its ranks.
"""

import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import torch
from torch import Tensor

from cafe_tta import storage
from cafe_tta.options import Options, option
from cafe_tta.serve.cameras import check_name
from cafe_tta.serve.events import MOST_VERSION, from_json

IMAGES, IMAGES_FORMAT = "serve-images", 1
FOLLOWER = r"[\w.:-]{1,64}"  # what a follower may call itself
CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 20.0
MOST_JSON = 16 * 2**20  # bytes of a standing, or of an error
PRESENT = 10.0  # seconds since its last question in which a follower counts as present
REMEMBERED = 256  # followers, of which the one that was silent longest is forgotten
LONGEST_PAUSE = 30.0  # seconds that a busy leader may ask for


class LeaderAway(Exception):
    """The leader does not answer, or not as a leader should."""


class LeaderBusy(Exception):
    """The leader answers, but has no room for images."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds  # after which to send the next ones


@dataclass(frozen=True)
class Standing(Options):
    """What followers have to know of their leader, beside its snapshot."""

    run: str = option(None, "Which run of the leader this is.", pattern=(r"[0-9a-f]{16}", "an id"))
    version: int = option(None, "Of the snapshot that answers.", least=0, most=MOST_VERSION)
    adapting: bool = option(None, "Whether it adapts now.")
    source: list[str] = option(None, "Cameras that the source model answers.")
    quarantined: dict[str, str] = option(None, "Cameras that are quarantined, and why.")
    opted_out: list[str] = option(None, "Cameras whose images are not adapted to.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*self.source, *self.quarantined, *self.opted_out):
            check_name(name)
        if not all(isinstance(why, str) for why in self.quarantined.values()):
            raise ValueError("expected `quarantined` to be texts")

    @classmethod
    def read(cls, content: bytes) -> "Standing":
        """The standing in the answer of a leader; raises ValueError where it is none."""
        try:
            parsed = json.loads(content)
        except RecursionError:
            raise ValueError("its lists are nested too deeply") from None
        standing: Standing = from_json(cls, parsed, "the standing of the leader")
        return standing

    def write(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, eq=False)
class Outgoing:
    """An image on its way to the leader."""

    camera: str
    image: Tensor  # as the classifier wants it
    verified: bool  # it came with its camera's token
    request: str  # id of the request that brought it


def pack_images(images: Sequence[Outgoing]) -> bytes:
    meta = [{"camera": each.camera, "verified": each.verified, "request": each.request} for each in images]
    stacked = torch.stack([each.image for each in images])
    return storage.pack(IMAGES, IMAGES_FORMAT, {"images": stacked}, meta)


def unpack_images(content: bytes, shape: Sequence[int], most: int, largest: float) -> list[Outgoing]:
    """The images that a follower sent; raises ValueError where they are not as a follower makes them."""
    tensors, meta = storage.unpack(content, IMAGES, IMAGES_FORMAT, "the body")
    images = tensors.get("images")
    if images is None or images.dtype != torch.float32 or list(images.shape[1:]) != list(shape):
        found = "none" if images is None else f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"expected float32 images of shape {tuple(shape)}, but got {found}")
    if not 1 <= len(images) <= most:
        raise ValueError(f"expected 1 to {most} images (max_batch_size), but got {len(images)}")
    if not isinstance(meta, list) or len(meta) != len(images):
        raise ValueError(f"expected a camera for each of {len(images)} images")
    if not bool((images.abs() <= largest).all()):  # also where one is NaN
        raise ValueError(f"expected finite, preprocessed values, at most {largest:g}")
    return [_outgoing(image, known) for image, known in zip(images, meta, strict=True)]


def _outgoing(image: Tensor, known: Any) -> Outgoing:
    if not isinstance(known, dict):
        raise ValueError("expected a table of camera, verified and request for each image")
    camera, verified, request = known.get("camera"), known.get("verified"), known.get("request", "-")
    check_name(camera)
    if not isinstance(camera, str) or not isinstance(verified, bool) or not isinstance(request, str):
        raise ValueError("expected `camera` and `request` to be texts, and `verified` to be true or false")
    return Outgoing(camera, image, verified, request[:64])


@dataclass
class _Known:
    last_seen: float  # in seconds since 1970
    version: int = 0  # that it answers with
    images: int = 0  # that it sent


class Followers:
    """The followers of one model, as their leader knows them: who they are, and what they sent. For one thread."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}  # the one that was silent longest comes first
        self.images = 0  # that all of them sent

    def note(self, name: str, version: int, images: int = 0) -> None:
        known = self._known.pop(name, None) or _Known(0.0)
        self._known[name] = _Known(time.time(), version, known.images + images)
        self.images += images
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def describe(self) -> dict[str, Any]:
        """For the status: those that are present, and the images of all."""
        now = time.time()
        present = [
            {"follower": name, "last_seen": known.last_seen, "version": known.version, "images": known.images}
            for name, known in list(self._known.items())
            if now - known.last_seen < PRESENT
        ]
        return {"followers": present, "follower_images": self.images}


class Leader:
    """The leader of one model, as a follower sees it. For one thread."""

    def __init__(self, url: str, model: str, token: str | None) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._query: dict[str, Any] = {"model": model, "follower": f"{_host()}:{os.getpid()}:{secrets.token_hex(4)}"}
        self._headers = {"Authorization": f"Bearer {token}"}
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)

    def standing(self, version: int) -> Standing:
        """Asks for the leader's standing; `version` is the one that answers here."""
        return self._standing(self._ask("GET", "standing", MOST_JSON, version=version))

    def send(self, images: Sequence[Outgoing], version: int) -> Standing:
        """Sends images to adapt to; the leader's standing comes back."""
        return self._standing(self._ask("POST", "images", MOST_JSON, pack_images(images), version=version))

    def snapshot(self, limit: int) -> bytes:
        """The leader's snapshot: at most so many bytes."""
        return self._ask("GET", "snapshot", limit)

    def close(self) -> None:
        self._connection.close()

    @staticmethod
    def _standing(content: bytes) -> Standing:
        try:
            return Standing.read(content)
        except ValueError as error:
            raise LeaderAway(f"its answer is not that of a leader: {error}") from None

    def _ask(self, method: str, what: str, limit: int, body: bytes | None = None, **query: Any) -> bytes:
        address = f"{self._prefix}/api/{what}?{urlencode(self._query | query)}"
        kept = self._connection.sock is not None
        try:
            status, headers, content = self._exchange(method, address, body, limit)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not kept:
                raise LeaderAway(f"no answer ({_said(error)})") from None
            return self._ask(method, what, limit, body, **query)  # a kept connection may have been closed meanwhile
        if status == 200 and len(content) <= limit:
            return content
        self.close()  # the rest of the answer was not read
        if status == 200:
            raise LeaderAway(f"its answer is longer than {limit} bytes")
        text = _error_text(content)
        if status in (429, 503) and "retry-after" in headers:  # a proxy whose server is gone says no such thing
            raise LeaderBusy(text, _seconds(headers["retry-after"]))
        raise LeaderAway(f"it answers {status}: {text}")

    def _exchange(
        self, method: str, address: str, body: bytes | None, limit: int
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        if self._connection.sock is None:
            self._connection.connect()
        if self._connection.sock is not None:
            self._connection.sock.settimeout(ANSWER_SECONDS)
        self._connection.request(method, address, body, self._headers)
        response = self._connection.getresponse()
        return response.status, response.headers, response.read(limit + 1)


def _host() -> str:
    return "".join(letter for letter in socket.gethostname() if letter.isascii() and letter.isalnum())[:32] or "host"


def _said(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or error or type(error).__name__)


def _error_text(content: bytes) -> str:
    try:
        text = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no reason given"
    return str(text)[:300]


def _seconds(text: str) -> float:
    return min(float(text), LONGEST_PAUSE) if text.isascii() and text.isdigit() else 1.0
