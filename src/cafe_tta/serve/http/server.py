"""Running the application: one process. The adapted states of several workers would drift apart; see `follower`."""

import asyncio
import contextlib
import ctypes
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from cafe_tta.serve.events import request_id
from cafe_tta.serve.http.app import App, create_app
from cafe_tta.serve.http.middleware import ServeError, with_deadline

KEEP_ALIVE = 75  # seconds: longer than clients keep idle connections, which would otherwise find them closed
LARGE_BLOCK = 32 << 20  # bytes: smaller blocks are reused by the process; the most that glibc allows
FREE_MEMORY = 256 << 20  # bytes of freed memory that the process keeps for the next batch
TIME = "%Y-%m-%dT%H:%M:%S%z"
GRACE = 2  # seconds beyond draining, to write the answers

log = logging.getLogger(__name__)


def bind(host: str, port: int, setting: str = "port") -> socket.socket:
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
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; choose another `{setting}`") from None
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
        self._grpc: Any = None  # its server, where there is one

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._reload_on_hangup()
            await self._start_grpc()
            self._say(f"serving {self._names} on {self._where}")

    @property
    def _names(self) -> str:
        return ",".join(self._app.models)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._say("stopping: answering waiting requests")
        grpc = None if self._grpc is None else asyncio.create_task(self._grpc.stop(self._app.settings.drain_seconds))
        draining = asyncio.create_task(self._app.drain())
        await super().shutdown(sockets)
        await draining
        if grpc is not None:
            await grpc
        self._say("stopped")

    async def _start_grpc(self) -> None:
        settings = self._app.settings
        if settings.grpc_port is None:
            return
        from cafe_tta.serve.http import rpc

        self._grpc, port = await rpc.start(self._app)
        self._say(f"serving {self._names} over gRPC on {settings.host}:{port}")

    def _reload_on_hangup(self) -> None:
        """Takes the models of the settings as they are now on SIGHUP, where there is such a signal."""
        tasks: set[asyncio.Task[None]] = set()  # else a running one could be collected

        def begin() -> None:
            task = asyncio.create_task(self._reload())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        with contextlib.suppress(AttributeError, NotImplementedError):  # Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, begin)

    async def _reload(self) -> None:
        self._say("reloading: the present model answers until the next one is ready")
        try:
            await self._app.reload()
        except ServeError as error:
            self._say(f"error: {error.text}; the present model goes on answering")
        else:
            self._say(f"serving {self._names} on {self._where}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Line(logging.Formatter):
    """One line for each record: time, level, logger, request, text, and further fields."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not record.exc_info:
            text = " ".join(text.split())
        fields = getattr(record, "fields", {})
        more = "".join(f" {name}={json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
        stamp = self.formatTime(record, TIME)
        return f"{stamp} {record.levelname.lower()} {record.name} request={request_id.get()} {text}{more}"


class _Json(logging.Formatter):
    """One JSON object on a line for each record."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": self.formatTime(record, TIME),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request": request_id.get(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content | getattr(record, "fields", {}))


def log_line(text: str) -> None:
    """What the server says to whoever started it, as a record of the log."""
    log.info("%s", text)


def start_logging(level: str, form: str) -> None:
    """Lines on stderr, as text or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Line())
    ours = logging.getLogger("cafe_tta.serve")
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel(level.upper())
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = [handler]
    theirs.propagate = False
    theirs.setLevel(max(logging.WARNING, ours.level))
