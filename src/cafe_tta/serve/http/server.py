"""Running the application: one process, since the adapted states of several would drift apart."""

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from cafe_tta.serve.http.app import App, create_app
from cafe_tta.serve.http.middleware import request_id, with_deadline

KEEP_ALIVE = 75  # seconds: longer than clients keep idle connections, which would otherwise find them closed
LARGE_BLOCK = 32 << 20  # bytes: smaller blocks are reused by the process; the most that glibc allows
FREE_MEMORY = 256 << 20  # bytes of freed memory that the process keeps for the next batch
GRACE = 2  # seconds beyond draining, to write the answers

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet: a port in use is reported before the model is loaded."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"expected `host` to be an address of this machine, but got {host!r}") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; choose another `port`") from None
    return bound


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: App, bound: socket.socket, say: Callable[[str], None]) -> None:
    """Serves until a signal comes; then answers the waiting requests, and returns."""
    _reuse_freed_memory()
    config = uvicorn.Config(
        create_app(app),
        http=with_deadline(app.settings.body_timeout_seconds),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        workers=1,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=round(app.settings.drain_seconds) + GRACE,
        server_header=False,
    )
    asyncio.run(_Server(config, app, say, address(bound)).serve(sockets=[bound]))


def _reuse_freed_memory() -> None:
    """Keeps glibc from giving the memory of every batch back to the system, and from asking for it again.

    The page faults of fresh memory cost up to a fifth of a forward pass on a CPU.
    """
    trim_threshold, mmap_threshold = -1, -3  # of mallopt, as malloc.h numbers them
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, LARGE_BLOCK)
        libc.mallopt(trim_threshold, FREE_MEMORY)


class _Server(uvicorn.Server):
    """uvicorn, except that draining begins with the signal, and that a signal is no failure."""

    def __init__(self, config: uvicorn.Config, app: App, say: Callable[[str], None], where: str) -> None:
        super().__init__(config)
        self._app, self._say, self._where = app, say, where

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._say(f"serving {self._app.signature.name} on {self._where}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._say("stopping: answering waiting requests")
        draining = asyncio.create_task(self._app.inference.drain())
        await super().shutdown(sockets)
        await draining
        self._say("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Line(logging.Formatter):
    """One line for each record: time, level, request, text."""

    def format(self, record: logging.LogRecord) -> str:
        where = request_id.get()
        text = super().format(record)
        if not record.exc_info:
            text = " ".join(text.split())
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")
        return f"{stamp} {record.levelname.lower()} {record.name} request={where} {text}"


def start_logging(level: str) -> None:
    """Plain lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    ours = logging.getLogger("cafe_tta.serve")
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel(level.upper())
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = [handler]
    theirs.propagate = False
    theirs.setLevel(max(logging.WARNING, ours.level))
