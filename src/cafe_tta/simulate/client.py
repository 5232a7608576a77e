"""A client of the Open Inference Protocol v2 in its binary form, over one kept connection. Standard library only."""

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

LOST_AFTER = 60.0  # seconds of trying after which a request counts as lost
LONGEST_PAUSE = 5.0
BUSY = (502, 503, 504)  # the server is starting or stopping, or a proxy before it has lost it
Wait = Callable[[float], object]  # waits for a number of seconds; a true result means: stop


class RequestLost(RuntimeError):
    """A request that was not answered, and why."""


class Stopped(RuntimeError):
    """The simulation was stopped while a request waited for its next attempt."""


class Away(RuntimeError):
    """No server answers, or it is not ready yet."""


@dataclass(frozen=True)
class Answer:
    """The classes of some images, and what it took to get them."""

    labels: np.ndarray
    seconds: float  # of the attempt that was answered
    version: int | None  # of the model that answered
    busy: int  # times that the server was busy (429) or not ready
    broken: int  # times that the connection broke


class Client:
    """A connection to one server, for one thread."""

    def __init__(self, url: str, token: str | None = None, *, wait: Wait = time.sleep, timeout: float = 30.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected `url` to be like http://127.0.0.1:8080, but got {url!r}")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout)
        self._wait = wait
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def close(self) -> None:
        self._connection.close()

    def until_ready(self, seconds: float, note: Callable[[str], None] = lambda _: None) -> None:
        """Waits until the server can answer images, for a limited time."""
        last = time.monotonic() + seconds
        noted = False
        while True:
            try:
                self.request("/v2/health/ready")
                return
            except Away as error:
                if time.monotonic() > last:
                    raise
                if not noted:
                    note(f"waiting for the server: {error}")
                noted = True
            if self._wait(0.25):
                raise Stopped

    def get(self, path: str) -> Any:
        """The JSON at an address of the server."""
        try:
            return json.loads(self.request(path))
        except ValueError:
            raise RuntimeError(f"{self.url}{path} did not answer with JSON; is this a server of cafe-tta?") from None

    def request(self, path: str) -> bytes:
        """The content of an address of the server."""
        try:
            self._connection.request("GET", self._prefix + path, headers=self._headers)
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            why = str(error) or type(error).__name__
            raise Away(f"no server answers at {self.url} ({why}); start one: cafe-tta serve") from error
        if response.status in BUSY:
            raise Away(f"the server at {self.url} is not ready: {_reason(body)}")
        if response.status != 200:
            raise RuntimeError(f"{self.url}{path} answered {response.status}: {_reason(body)}")
        return body

    def classify(self, model: str, images: np.ndarray, camera: str, adapt: bool = True) -> Answer:
        """Classes of images, as `request` takes them. Retries while the server is busy or away; raises `RequestLost`.

        Without `adapt` the server learns nothing from them.
        """
        header, body = request(images, camera, adapt)
        headers = {
            **self._headers,
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(header),
        }
        busy = broken = 0
        first = time.monotonic()
        while True:
            start = time.monotonic()
            try:
                self._connection.request("POST", f"{self._prefix}/v2/models/{model}/infer", body, headers)
                response = self._connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                broken += 1
                why, pause = str(error) or type(error).__name__, 0.2 * broken
            else:
                if response.status == 200:
                    labels, version = read(answer, response.getheader("Inference-Header-Content-Length"))
                    if len(labels) != len(images):
                        raise RequestLost(f"{len(images)} images were sent, but {len(labels)} answers came")
                    return Answer(labels, time.monotonic() - start, version, busy, broken)
                why = f"{response.status}: {_reason(answer)}"
                if response.status != 429 and response.status not in BUSY:
                    raise RequestLost(why)
                busy += 1
                pause = _seconds(response.getheader("Retry-After"))
            pause = min(pause, LONGEST_PAUSE)
            if time.monotonic() + pause - first > LOST_AFTER:
                raise RequestLost(f"given up after {LOST_AFTER:.0f} s; the last attempt: {why}")
            if self._wait(pause):
                raise Stopped


def request(images: np.ndarray, camera: str, adapt: bool = True) -> tuple[int, bytes]:
    """The body of an inference request, and how many bytes of it are its JSON header.

    Images are uint8 (n, H, W, 3), or float32 (n, 3, H, W) as the network receives them.
    """
    plain = images.dtype == np.float32
    pixels = np.ascontiguousarray(images, dtype="<f4" if plain else np.uint8).tobytes()
    tensor = {
        "name": "images",
        "datatype": "FP32" if plain else "UINT8",
        "shape": list(images.shape),
        "parameters": {"binary_data_size": len(pixels)},
    }
    asked = {"name": "label", "parameters": {"binary_data": True}}
    parameters = {"camera": camera} | ({} if adapt else {"adapt": False})
    header = json.dumps({"parameters": parameters, "inputs": [tensor], "outputs": [asked]}).encode()
    return len(header), header + pixels


def read(body: bytes, header_length: str | None) -> tuple[np.ndarray, int | None]:
    """Labels and model version of an answer, whether its tensors are binary or JSON."""
    try:
        length = len(body) if header_length is None else int(header_length)
        header = json.loads(body[:length])
        offset = length
        for output in header["outputs"]:
            size = output.get("parameters", {}).get("binary_data_size")
            if output["name"] == "label":
                values = output["data"] if size is None else np.frombuffer(body[offset : offset + size], "<i8")
                version = header.get("parameters", {}).get("model_version")
                return np.asarray(values, np.int64).reshape(-1), None if version is None else int(version)
            offset += size or 0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestLost(f"the answer cannot be read: {error}") from error
    raise RequestLost("the answer has no output called `label`")


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.01, float(retry_after or 0.2))
    except ValueError:  # a date: clocks may differ
        return 1.0
