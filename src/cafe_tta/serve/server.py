"""Running the application: one process, since the adapted states of several would drift apart."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cafe_tta.serve.app import App, create_app
from cafe_tta.serve.guarding import request_id

KEEP_ALIVE = 75  # seconds: longer than clients keep idle connections, or they would meet closed ones
GRACE = 2  # seconds beyond draining: for answers to be written

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet: a taken port is known before the model is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"expected host to be an address of this machine, but got {host!r}") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port") from None
    return bound


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(make_app: Callable[[], App], bound: socket.socket, say: Callable[[str], None]) -> None:
    """Serves until a signal comes; then answers what waits, saves, and returns."""
    asyncio.run(_run(make_app, bound, say))


async def _run(make_app: Callable[[], App], bound: socket.socket, say: Callable[[str], None]) -> None:
    state = make_app()
    config = uvicorn.Config(
        create_app(state),
        http=_with_deadline(state.settings.body_timeout_seconds),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        workers=1,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=round(state.settings.drain_seconds) + GRACE,
        server_header=False,
    )
    await _Server(config, state, say, address(bound)).serve(sockets=[bound])


def _with_deadline(seconds: float) -> type[HttpToolsProtocol]:
    """Connections whose headers do not arrive in time are closed: uvicorn itself would wait for ever."""

    class Protocol(HttpToolsProtocol):
        _alarm: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_headers()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_headers()

        def on_headers_complete(self) -> None:
            self._forget()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            self._forget()
            self._alarm = self.loop.call_later(seconds, self.transport.close)

        def _forget(self) -> None:
            if self._alarm is not None:
                self._alarm.cancel()

    return Protocol


class _Server(uvicorn.Server):
    """uvicorn, but draining begins with the signal, and a signal is no failure."""

    def __init__(self, config: uvicorn.Config, state: App, say: Callable[[str], None], where: str) -> None:
        super().__init__(config)
        self._state, self._say, self._where = state, say, where

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._say(f"serving {self._state.signature.name} on {self._where}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._say("stopping: answering what waits")
        draining = asyncio.create_task(self._state.inference.drain())
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
