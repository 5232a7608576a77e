"""What surrounds every request: a deadline for its headers, an id, access rules, errors as JSON, the access log."""

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cafe_tta.serve.events import request_id

REQUEST_ID = r"[\w.:-]{1,64}"  # what a client may call its request
log = logging.getLogger("cafe_tta.serve.access")


class ServeError(Exception):
    """An answer that is an error: its HTTP status, its text, and when to try again."""

    def __init__(self, status: int, text: str, retry_after: int | None = None, close: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after = retry_after  # seconds
        self.close = close  # the connection: the rest of the request was not read


def bad_request(text: str) -> ServeError:
    return ServeError(400, text)


# Access


def has_token(request: Request, token: str | None) -> bool:
    if token is None:
        return False
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
    return kind.lower() == "bearer" and same


def check_token(request: Request, token: str | None) -> None:
    """Refuses requests without the token, if there is one."""
    if token is not None and not has_token(request, token):
        given = "authorization" in request.headers
        raise ServeError(401, "the bearer token is wrong" if given else "this needs the header Authorization: Bearer …")


def check_site(request: Request, token: str | None) -> None:
    """Refuses requests that a page of another web site sends through its reader's browser."""
    headers = request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    else:
        foreign = origin is not None and urlsplit(origin).netloc != headers.get("host")
    if foreign and not has_token(request, token):
        raise ServeError(403, "requests from pages of other web sites are refused")


# Errors, ids and the access log


def install(app: FastAPI, access_log: bool) -> None:
    """Answers errors as {"error": …}, and gives every request an id and, if wanted, a line in the log."""

    @app.exception_handler(ServeError)
    async def _(request: Request, error: ServeError) -> Response:
        return _error(error.status, error.text, error.retry_after, error.close)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path[:200]}"
        text = {404: f"no such address: {what}", 405: f"this address does not take {request.method}"}
        return _error(error.status_code, text.get(error.status_code, str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        return _error(400, "the address cannot be read")

    app.add_middleware(Requests, access_log=access_log)


def _error(status: int, text: str, retry_after: int | None = None, close: bool = False) -> Response:
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
    if close:
        headers["Connection"] = "close"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps({"error": text}).encode(), status, headers, "application/json")


class Requests:
    """Gives every request an id, keeps errors from being lost, and writes the access log."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self.app, self.access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        own = given if re.fullmatch(REQUEST_ID, given, re.ASCII) else uuid.uuid4().hex[:16]
        token = request_id.set(own)
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", own.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("%s %r failed", scope["method"], scope["path"])
            if status:
                raise
            await _error(500, f"internal error: {type(error).__name__}; the server's log says more")(
                scope, receive, send_with_id
            )
        finally:
            if self.access_log:
                seconds = time.monotonic() - started
                log.info("%s %r %d %.1f ms", scope["method"], scope["path"], status, 1000 * seconds)
            request_id.reset(token)


# Connections


def with_deadline(seconds: float) -> type[HttpToolsProtocol]:
    """A protocol that closes connections whose headers do not arrive in time; uvicorn itself would keep waiting."""

    class Protocol(HttpToolsProtocol):
        _alarm: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_headers()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_headers()

        def on_headers_complete(self) -> None:
            self._cancel()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            self._cancel()
            self._alarm = self.loop.call_later(seconds, self.transport.close)

        def _cancel(self) -> None:
            if self._alarm is not None:
                self._alarm.cancel()

    return Protocol
