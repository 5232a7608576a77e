"""The server's HTTP: the Open Inference Protocol, health, metrics, the page and its controls."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from cafe_tta.models import Preprocessing
from cafe_tta.serve.http import dashboard, middleware
from cafe_tta.serve.http.body import Lease, read_body
from cafe_tta.serve.http.inference import Inference
from cafe_tta.serve.http.metrics import CONTENT_TYPE
from cafe_tta.serve.http.middleware import ServeError, bad_request
from cafe_tta.serve.http.protocol import VERSION, Signature
from cafe_tta.serve.service import Service

log = logging.getLogger(__name__)

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration"]
WATCHERS = 64  # dashboards that may be open at once
CONTROLS = ("pause", "resume", "reset", "rollback", "save")


class App:
    """The handlers of all addresses of a running server."""

    def __init__(self, service: Service, preprocessing: Preprocessing) -> None:
        self.service, self.settings = service, service.settings
        self.signature = Signature.of(service, preprocessing)
        self.inference = Inference(service, self.signature)
        self.watchers = 0
        self._status: tuple[float, bytes] = (0.0, b"")

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.inference.open()
        try:
            yield
        finally:
            await self.inference.drain()

    # The Open Inference Protocol

    async def server_metadata(self) -> Response:
        return answer({"name": "cafe-tta", "version": _version(), "extensions": EXTENSIONS})

    async def live(self) -> Response:
        return Response()

    async def ready(self) -> Response:
        await self.inference.require_ready()
        return Response()

    async def model_ready(self, name: str, version: str = VERSION) -> Response:
        self.inference.require_model(name, version)
        return await self.ready()

    async def model_metadata(self, name: str, version: str = VERSION) -> Response:
        self.inference.require_model(name, version)
        return answer(self.signature.metadata())

    async def model_configuration(self, name: str, version: str = VERSION) -> Response:
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
        headers = {
            "Content-Security-Policy": dashboard.csp(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return Response(dashboard.html(), media_type="text/html", headers=headers)

    async def favicon(self) -> Response:
        return Response(dashboard.FAVICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})

    async def status(self) -> Response:
        return Response(await self._status_json(), media_type="application/json")

    async def events(self) -> Response:
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
        return Response(await asyncio.to_thread(self.inference.metrics.text), headers={"Content-Type": CONTENT_TYPE})

    async def control(self, request: Request, action: str) -> Response:
        if action not in CONTROLS:
            raise ServeError(404, f"no control {action[:40]!r}; choose from: {', '.join(CONTROLS)}")
        body = await self._operator_body(request)
        chosen = _rollback_version(body) if action == "rollback" else None
        act: Callable[[], None] = getattr(self.service, action)
        return await self._act(action, lambda: self.service.rollback(chosen) if action == "rollback" else act())

    async def camera(self, request: Request, name: str) -> Response:
        """Excludes a camera from adapting, or lets it in again."""
        adapt = _adapt_flag(await self._operator_body(request))
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
            raise ServeError(409, str(error)) from None
        log.info("%s by an operator", what)
        self._status = (0.0, b"")
        return answer({"ok": True, "version": (await asyncio.to_thread(self.service.status))["version"]})


def create_app(state: App) -> FastAPI:
    """The application that uvicorn runs."""
    # No generated pages: they would load scripts from other hosts, and the protocol is documented already.
    app = FastAPI(title="cafe-tta", docs_url=None, redoc_url=None, openapi_url=None, lifespan=state.lifespan)
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
    for path, handler in get.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    for path in (f"{model}/infer", f"{model}/versions/{{version}}/infer"):
        app.add_api_route(path, state.inference.infer, methods=["POST"], response_model=None)
    app.add_api_route("/api/{action}", state.control, methods=["POST"], response_model=None)
    app.add_api_route("/api/cameras/{name:path}", state.camera, methods=["POST"], response_model=None)
    middleware.install(app, state.settings.access_log)
    return app


def _version() -> str:
    try:
        return version("cafe-tta")
    except PackageNotFoundError:  # used from its source folder
        return "0.0.0"


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


def _adapt_flag(body: bytearray) -> bool:
    content = _read_json(body, '{"adapt": true or false}')
    adapt = content.get("adapt") if isinstance(content, dict) else None
    if not isinstance(adapt, bool):
        raise bad_request(f'expected {{"adapt": true or false}}, but got {str(content)[:80]}')
    return adapt


def _read_json(body: bytearray, expected: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request(f"expected {expected}, but the body is no JSON") from None
