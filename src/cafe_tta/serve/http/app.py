"""The server's HTTP: the Open Inference Protocol, health, metrics, the page and its controls."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from cafe_tta._version import __version__
from cafe_tta.models import Preprocessing
from cafe_tta.serve.events import names_only
from cafe_tta.serve.http import dashboard, middleware, openapi
from cafe_tta.serve.http.body import Lease, read_body
from cafe_tta.serve.http.inference import Inference
from cafe_tta.serve.http.metrics import CONTENT_TYPE, Metrics
from cafe_tta.serve.http.middleware import ServeError, bad_request
from cafe_tta.serve.http.protocol import VERSION, Signature
from cafe_tta.serve.service import Service
from cafe_tta.serve.settings import Settings

log = logging.getLogger(__name__)

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration"]
WATCHERS = 64  # dashboards that may be open at once
CONTROLS = ("pause", "resume", "reset", "rollback", "save")
RELOAD = "reload"
_CAMERA = '{"adapt": true or false} or {"undo": true}'


Next = Callable[[], tuple[Service, Preprocessing]]


class App:
    """The handlers of all addresses of a running server.

    `build_next` builds, from the settings as they are then, the service that a reload replaces the present one with.
    """

    def __init__(self, service: Service, preprocessing: Preprocessing, build_next: Next | None = None) -> None:
        self.metrics = Metrics(lambda: self.service.status(), self._waiting, service.settings.metrics_cameras)
        self.inference = Inference(service, Signature.of(service, preprocessing), self.metrics)
        self.watchers = 0
        self._build_next = build_next
        self._reloading = asyncio.Lock()
        self._status: tuple[float, bytes] = (0.0, b"")

    @property
    def service(self) -> Service:
        return self.inference.service

    @property
    def settings(self) -> Settings:
        return self.inference.settings

    @property
    def signature(self) -> Signature:
        return self.inference.signature

    def _waiting(self) -> int:
        return self.inference.waiting

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.inference.open()
        try:
            yield
        finally:
            await self.inference.drain()

    # Another model

    async def replace_model(self) -> None:
        """Builds the service that the settings describe now, and lets it answer once it is ready.

        Until then, and where it cannot be built, the present one answers. Requests that have begun are answered by the
        one they began with, which then saves its state and ends.
        """
        if self._build_next is None:
            raise ServeError(409, "cannot reload: this server was not started from settings")
        if self._reloading.locked():
            raise ServeError(409, "cannot reload: a reload is under way")
        async with self._reloading:
            old = self.inference
            try:
                self.inference = await self._opened(self._build_next)
            except ServeError as error:
                await asyncio.to_thread(old.service.note, "error", error.text)
                raise
            await asyncio.to_thread(self.service.note, "started", f"answers instead of {old.signature.name}")
            await old.drain()
            await asyncio.to_thread(old.service.close)

    async def _opened(self, build_next: Next) -> Inference:
        try:
            service, preprocessing = await asyncio.to_thread(build_next)
        except (ValueError, OSError) as error:
            raise ServeError(409, f"cannot reload: {names_only(str(error))}") from None
        inference = None
        try:
            inference = Inference(service, Signature.of(service, preprocessing), self.metrics)
            await asyncio.to_thread(service.start)
            inference.open()
            await inference.require_ready()
        except (ValueError, OSError, ServeError) as error:
            if inference is not None:
                await inference.drain()
            await asyncio.to_thread(service.close)
            raise ServeError(409, f"cannot reload: {names_only(str(error))}") from None
        return inference

    # The Open Inference Protocol

    async def infer(self, request: Request, name: str, version: str = VERSION) -> Response:
        """Classifies images."""
        return await self.inference.infer(request, name, version)

    async def repository_index(self) -> Response:
        """The models of this server."""
        return answer(await self.models())

    async def models(self) -> list[dict[str, str]]:
        """The models as Triton lists them: there is one."""
        try:
            await self.inference.require_ready()
            state, reason = "READY", ""
        except ServeError as error:
            state, reason = "UNAVAILABLE", error.text
        return [{"name": self.signature.name, "version": VERSION, "state": state, "reason": reason}]

    async def server_metadata(self) -> Response:
        """Name, version and protocol extensions of the server."""
        return answer({"name": "cafe-tta", "version": __version__, "extensions": EXTENSIONS})

    async def live(self) -> Response:
        """Whether the server runs."""
        return Response()

    async def ready(self) -> Response:
        """Whether the model answers; 503 while it does not."""
        await self.inference.require_ready()
        return Response()

    async def model_ready(self, name: str, version: str = VERSION) -> Response:
        """Whether this model answers; 503 while it does not."""
        self.inference.require_model(name, version)
        return await self.ready()

    async def model_metadata(self, name: str, version: str = VERSION) -> Response:
        """Inputs and outputs of the model, and its classes."""
        self.inference.require_model(name, version)
        return answer(self.signature.metadata())

    async def model_configuration(self, name: str, version: str = VERSION) -> Response:
        """Batching and limits, as Triton writes them."""
        self.inference.require_model(name, version)
        settings, metadata = self.settings, self.signature.metadata()
        policy = {
            "timeout_action": settings.timeout_action.upper(),
            "default_timeout_microseconds": settings.default_timeout_microseconds,
            "allow_timeout_override": settings.allow_timeout_override,
            "max_queue_size": settings.max_queue_size,
        }
        return answer(
            {
                "name": self.signature.name,
                "platform": metadata["platform"],
                "max_batch_size": settings.max_batch_size,
                "input": [_as_configured(tensor) for tensor in metadata["inputs"]],
                "output": [_as_configured(tensor) for tensor in metadata["outputs"]],
                "dynamic_batching": {
                    "max_queue_delay_microseconds": settings.max_queue_delay_microseconds,
                    "default_queue_policy": policy,
                },
            }
        )

    # The dashboard, its data and its controls

    async def page(self) -> Response:
        """The dashboard."""
        headers = {
            "Content-Security-Policy": dashboard.csp(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return Response(dashboard.html(), media_type="text/html", headers=headers)

    async def favicon(self) -> Response:
        """The dashboard's icon."""
        return Response(dashboard.FAVICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})

    async def status(self) -> Response:
        """All that the dashboard shows."""
        return Response(await self._status_json(), media_type="application/json")

    async def events(self) -> Response:
        """The status once a second, as server-sent events."""
        if self.watchers >= WATCHERS:
            raise ServeError(503, f"{WATCHERS} dashboards are open already", retry_after=30)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._watch(), media_type="text/event-stream", headers=headers)

    async def _watch(self) -> AsyncIterator[bytes]:
        self.watchers += 1
        try:
            while not self.inference.stopping.is_set():
                yield b"event: status\ndata: " + await self._status_json() + b"\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.inference.stopping.wait(), 1.0)
        finally:
            self.watchers -= 1

    async def _status_json(self) -> bytes:
        """The status, computed at most four times a second, however many dashboards are open."""
        made, text = self._status
        if time.monotonic() - made > 0.25 or not text:
            text = await asyncio.to_thread(lambda: _plain_json(self.service.status()))
            self._status = (time.monotonic(), text)
        return text

    async def metrics_text(self) -> Response:
        """Metrics for Prometheus."""
        return Response(await asyncio.to_thread(self.metrics.text), headers={"Content-Type": CONTENT_TYPE})

    async def control(self, request: Request, action: str) -> Response:
        """Pauses, resumes, resets, rolls back, saves, or takes the model of the settings as they are now."""
        if action not in (*CONTROLS, RELOAD):
            raise ServeError(404, f"no control {action[:40]!r}; choose from: {', '.join((*CONTROLS, RELOAD))}")
        body = await self._operator_body(request)
        if action == RELOAD:
            await self.replace_model()
            return await self._done(RELOAD)
        chosen = _rollback_version(body) if action == "rollback" else None
        act: Callable[[], None] = getattr(self.service, action)
        return await self._act(action, lambda: self.service.rollback(chosen) if action == "rollback" else act())

    async def camera(self, request: Request, name: str) -> Response:
        """Excludes a camera from adapting, lets it in again, or undoes what was learnt from it."""
        body = await self._operator_body(request)
        if _wants_undo(body):
            return await self._act(f"camera {name!r} undone", lambda: self.service.undo(name))
        adapt = _adapt_flag(body)
        act = "opted in" if adapt else "opted out"
        return await self._act(f"camera {name!r} {act}", lambda: self.service.camera_opt_out(name, out=not adapt))

    async def _operator_body(self, request: Request) -> bytearray:
        """The body of a request that only operators may send."""
        middleware.check_site(request, self.settings.token)
        middleware.check_token(request, self.settings.token)
        with Lease(self.inference.pending) as lease:
            return await read_body(request, lease, 4096, self.settings.body_timeout_seconds)

    async def _act(self, what: str, act: Callable[[], None]) -> Response:
        try:
            await asyncio.to_thread(act)
        except ValueError as error:
            raise ServeError(409, names_only(str(error))) from None
        return await self._done(what)

    async def _done(self, what: str) -> Response:
        log.info("%s by an operator", what)
        self._status = (0.0, b"")
        return answer({"ok": True, "version": (await asyncio.to_thread(self.service.status))["version"]})


def create_app(state: App) -> FastAPI:
    """The application that uvicorn runs."""
    # No generated pages: they would load scripts from other hosts.
    app = FastAPI(title="cafe-tta", version=__version__, docs_url=None, redoc_url=None, lifespan=state.lifespan)
    model = "/v2/models/{name}"
    get: dict[str, Callable[..., Any]] = {
        "/v2": state.server_metadata,
        "/v2/health/live": state.live,
        "/v2/health/ready": state.ready,
        model: state.model_metadata,
        f"{model}/ready": state.model_ready,
        f"{model}/config": state.model_configuration,
        f"{model}/versions/{{version}}": state.model_metadata,
        f"{model}/versions/{{version}}/ready": state.model_ready,
        f"{model}/versions/{{version}}/config": state.model_configuration,
        "/": state.page,
        "/favicon.ico": state.favicon,
        "/api/status": state.status,
        "/api/events": state.events,
        "/metrics": state.metrics_text,
    }
    post: dict[str, Callable[..., Any]] = {
        "/v2/repository/index": state.repository_index,
        f"{model}/infer": state.infer,
        f"{model}/versions/{{version}}/infer": state.infer,
        "/api/{action}": state.control,
        "/api/cameras/{name:path}": state.camera,
    }
    for method, routes in (("GET", get | {"/v2/repository/index": state.repository_index}), ("POST", post)):
        for path, handler in routes.items():
            app.add_api_route(path, handler, methods=[method], **openapi.describe(method, path, handler))
    middleware.install(app, state.settings.access_log)
    openapi.install(app)
    return app


def answer(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content).encode(), status, media_type="application/json")


def _as_configured(tensor: dict[str, Any]) -> dict[str, Any]:
    kind = {"BYTES": "STRING"}.get(tensor["datatype"], tensor["datatype"])
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"][1:] or [1]}


def _plain_json(status: Any) -> bytes:
    """Strict JSON, without NaN and infinity."""
    try:
        return json.dumps(status, allow_nan=False).encode()
    except ValueError:
        return json.dumps(json.loads(json.dumps(status), parse_constant=lambda _: None)).encode()


def _rollback_version(body: bytearray) -> int | None:
    if not body.strip():
        return None
    content = _read_json(body, '{"version": number} or nothing')
    version = content.get("version") if isinstance(content, dict) else content
    if version is not None and type(version) is not int:
        raise bad_request(f'expected {{"version": number}} or nothing, but got {str(content)[:80]}')
    return version


def _wants_undo(body: bytearray) -> bool:
    content = _read_json(body, _CAMERA)
    return isinstance(content, dict) and list(content) == ["undo"] and content["undo"] is True


def _adapt_flag(body: bytearray) -> bool:
    content = _read_json(body, _CAMERA)
    adapt = content.get("adapt") if isinstance(content, dict) else None
    if not isinstance(adapt, bool):
        raise bad_request(f"expected {_CAMERA}, but got {str(content)[:80]}")
    return adapt


def _read_json(body: bytearray, expected: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request(f"expected {expected}, but the body is no JSON") from None
