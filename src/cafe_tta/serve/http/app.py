"""The server's HTTP: the Open Inference Protocol, health, metrics, the page and its controls."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from cafe_tta._version import __version__
from cafe_tta.serve.build import Built, named
from cafe_tta.serve.events import names_only
from cafe_tta.serve.http import dashboard, middleware, openapi
from cafe_tta.serve.http.body import Lease, ModelBytes, PendingBytes, read_body
from cafe_tta.serve.http.followers import follower_name, receive, require_follower
from cafe_tta.serve.http.inference import Inference
from cafe_tta.serve.http.metrics import CONTENT_TYPE, Metrics
from cafe_tta.serve.http.middleware import ServeError, bad_request
from cafe_tta.serve.http.protocol import VERSION
from cafe_tta.serve.settings import Settings

log = logging.getLogger(__name__)

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration"]
WATCHERS = 64  # dashboards that may be open at once
CONTROLS = ("pause", "resume", "reset", "rollback", "save")
RELOAD = "reload"
_CAMERA = '{"adapt": true or false} or {"undo": true}'


@dataclass(frozen=True)
class Reloader:
    """What a reload asks: the settings of all models as they are now, and the model of some settings."""

    plan: Callable[[], list[Settings]]
    build: Callable[[Settings], Built]


class App:
    """The handlers of all addresses of a running server: those of a model by its name, and those of all models."""

    def __init__(self, built: Sequence[Built], reloader: Reloader | None = None) -> None:
        self.settings = built[0].service.settings  # for what belongs to the process: the same for all models
        self.pool = PendingBytes(self.settings.max_pending_bytes, len(built))
        self.metrics = Metrics(lambda: self.models)
        self.models: Mapping[str, Inference] = {}  # replaced as a whole: any thread may read it
        for each in built:
            self._serve(Inference(each, self.metrics, self.pool))
        self.stopping = asyncio.Event()
        self.watchers = 0
        self._reloader = reloader
        self._reloading = asyncio.Lock()
        self._statuses: dict[str, tuple[float, bytes]] = {}  # of models: when it was made, and its JSON

    def _serve(self, inference: Inference) -> Inference | None:
        """Lets a model answer, and gives back the one of its name that did so far."""
        inference.require_room(self.pool.part)
        name = inference.signature.name
        before = self.models.get(name)
        self.models = {**self.models, name: inference}
        return before

    def model(self, name: str | None) -> Inference:
        """The model of that name; without a name, the only one."""
        models = self.models
        if name is None:
            if len(models) > 1:
                example = f"?model={next(iter(models))}"
                raise ServeError(409, f"this server has {len(models)} models; say which one, such as {example}")
            return next(iter(models.values()))
        if name not in models:
            raise ServeError(404, f"no model {name[:100]!r}; this server has {', '.join(map(repr, models))}")
        return models[name]

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        for inference in self.models.values():
            inference.open()
        try:
            yield
        finally:
            await self.drain()

    async def drain(self) -> None:
        """Answers the admitted requests to all models; then refuses the rest."""
        self.stopping.set()
        await asyncio.gather(*(inference.drain() for inference in self.models.values()))

    def close(self) -> None:
        """Ends all services, each of which saves its state."""
        for inference in self.models.values():
            inference.service.close()

    # Other models

    async def reload(self, name: str | None = None) -> None:
        """Serves the models that the settings describe now: replaces those that have changed, adds and removes others.

        With a name, and where there is one model only, that model is replaced even if it has not changed. Until the
        next one is ready, and where it cannot be built, the present one answers. Requests that have begun are answered
        by the one they began with, which then saves its state and ends.
        """
        if self._reloader is None:
            raise ServeError(409, "cannot reload: this server was not started from settings")
        if self._reloading.locked():
            raise ServeError(409, "cannot reload: a reload is under way")
        async with self._reloading:
            try:
                await self._reload(self._reloader, name)
            except ServeError as error:
                for inference in self.models.values():
                    await asyncio.to_thread(inference.service.note, "error", error.text)
                raise

    async def _reload(self, reloader: Reloader, name: str | None) -> None:
        try:
            plan = {str(named(settings).name): settings for settings in await asyncio.to_thread(reloader.plan)}
        except (ValueError, OSError) as error:
            raise ServeError(409, f"cannot reload: {names_only(str(error))}") from None
        if name is not None and name not in plan:
            raise ServeError(409, f"cannot reload {name[:100]!r}: the settings have {', '.join(map(repr, plan))}")
        forced = name is not None or len(plan) == len(self.models) == 1
        unchanged = [each for each in plan if not forced and self._is_current(each, plan[each])]
        gone = [] if name is not None else [each for each in self.models if each not in plan]
        self._take_limits(plan, unchanged, len({*plan} if name is None else {*self.models, name}))
        wrong = []
        for each in [name] if name is not None else [each for each in plan if each not in unchanged]:
            try:
                await self._replace(each, await self._opened(reloader, plan[each]))
            except ServeError as error:
                wrong.append(error.text if len(plan) == 1 else f"{each}: {error.text}")
        for each in gone if not wrong else ():
            await self._remove(each)
        self.pool.models = len(self.models)
        if wrong:
            kept = "" if len(plan) == 1 else "; what could not be replaced goes on, and nothing was removed"
            raise ServeError(409, f"cannot reload: {'; '.join(wrong)}{kept}")

    def _is_current(self, name: str, settings: Settings) -> bool:
        return name in self.models and self.models[name].built.is_current(settings)

    def _take_limits(self, plan: Mapping[str, Settings], unchanged: Sequence[str], models: int) -> None:
        """Takes up what belongs to the process, and divides its memory among so many models."""
        settings = next(iter(plan.values()))
        try:
            for each in unchanged:
                self.models[each].require_room(settings.max_pending_bytes // models)
        except ValueError as error:
            raise ServeError(409, f"cannot reload: {error}") from None
        for each in unchanged:
            self.models[each].settings = named(plan[each])
        self.settings = settings
        self.pool.limit, self.pool.models = settings.max_pending_bytes, models

    async def _opened(self, reloader: Reloader, settings: Settings) -> Inference:
        try:
            built = await asyncio.to_thread(reloader.build, settings)
        except (ValueError, OSError) as error:
            raise ServeError(409, names_only(str(error))) from None
        inference = None
        try:
            inference = Inference(built, self.metrics, self.pool)
            inference.require_room(self.pool.part)
            await asyncio.to_thread(built.service.start)
            inference.open()
            await inference.require_ready()
        except (ValueError, OSError, ServeError) as error:
            if inference is not None:
                await inference.drain()
            await asyncio.to_thread(built.service.close)
            if built.service.name not in self.models:
                self.metrics.forget(built.service.name)
            raise ServeError(409, names_only(str(error))) from None
        return inference

    async def _replace(self, name: str, inference: Inference) -> None:
        old = self._serve(inference)
        self._statuses.pop(name, None)
        text = "answers from now on" if old is None else f"answers instead of {old.signature.name}"
        await asyncio.to_thread(inference.service.note, "started", text)
        if old is not None:
            await self._end(old)

    async def _remove(self, name: str) -> None:
        old = self.models[name]
        self.models = {each: inference for each, inference in self.models.items() if each != name}
        self._statuses.pop(name, None)
        await self._end(old)
        self.metrics.forget(name)

    @staticmethod
    async def _end(old: Inference) -> None:
        await old.drain()
        await asyncio.to_thread(old.service.close)

    # The Open Inference Protocol

    async def infer(self, request: Request, name: str, version: str = VERSION) -> Response:
        """Classifies images."""
        if name in self.models:
            return await self.models[name].infer(request, version)
        with Lease(ModelBytes(self.pool)) as lease:  # the client sends its body to the end, and reads the refusal
            limit, patience = self.settings.max_body_bytes, self.settings.body_timeout_seconds
            await read_body(request, lease, limit, patience, admit=lambda: _ignore(self.model(name)))
        raise AssertionError("a model of that name would have answered")

    async def repository_index(self) -> Response:
        """The models of this server."""
        return answer(await self.index())

    async def index(self) -> list[dict[str, str]]:
        """The models as Triton lists them."""
        return [await _described(name, inference) for name, inference in self.models.items()]

    async def server_metadata(self) -> Response:
        """Name, version and protocol extensions of the server."""
        return answer({"name": "cafe-tta", "version": __version__, "extensions": EXTENSIONS})

    async def live(self) -> Response:
        """Whether the server runs."""
        return Response()

    async def ready(self) -> Response:
        """Whether all models answer; 503 while one does not."""
        await self.require_ready()
        return Response()

    async def require_ready(self) -> None:
        for name, inference in self.models.items():
            try:
                await inference.require_ready()
            except ServeError as error:
                text = error.text if len(self.models) == 1 else f"{name}: {error.text}"
                raise ServeError(error.status, text, error.retry_after) from None

    async def model_ready(self, name: str, version: str = VERSION) -> Response:
        """Whether this model answers; 503 while it does not."""
        await self.versioned(name, version).require_ready()
        return Response()

    async def model_metadata(self, name: str, version: str = VERSION) -> Response:
        """Inputs and outputs of the model, and its classes."""
        return answer(self.versioned(name, version).signature.metadata())

    def versioned(self, name: str, version: str) -> Inference:
        inference = self.model(name)
        inference.require_version(version)
        return inference

    async def model_configuration(self, name: str, version: str = VERSION) -> Response:
        """Batching and limits, as Triton writes them."""
        inference = self.versioned(name, version)
        settings, metadata = inference.settings, inference.signature.metadata()
        policy = {
            "timeout_action": settings.timeout_action.upper(),
            "default_timeout_microseconds": settings.default_timeout_microseconds,
            "allow_timeout_override": settings.allow_timeout_override,
            "max_queue_size": settings.max_queue_size,
        }
        return answer(
            {
                "name": name,
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

    async def page(self, model: str | None = None) -> Response:
        """The dashboard of a model; where there are several and none is named, the list of them."""
        listed = model is None and len(self.models) > 1
        if not listed:
            self.model(model)
        headers = {
            "Content-Security-Policy": dashboard.csp(listed),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return Response(dashboard.html(listed), media_type="text/html", headers=headers)

    async def favicon(self) -> Response:
        """The dashboard's icon."""
        return Response(dashboard.FAVICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})

    async def status(self, model: str | None = None) -> Response:
        """All that the dashboard of a model shows."""
        return Response(await self._status_json(self.model(model)), media_type="application/json")

    async def summary(self) -> Response:
        """The models, with what the list of them shows."""
        models = self.models.items()
        return answer(
            [_summary(await _described(name, each), json.loads(await self._status_json(each))) for name, each in models]
        )

    async def events(self, model: str | None = None) -> Response:
        """The status of a model once a second, as server-sent events."""
        self.model(model)
        if self.watchers >= WATCHERS:
            raise ServeError(503, f"{WATCHERS} dashboards are open already", retry_after=30)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._watch(model), media_type="text/event-stream", headers=headers)

    async def _watch(self, model: str | None) -> AsyncIterator[bytes]:
        self.watchers += 1
        try:
            while not self.stopping.is_set():
                try:
                    inference = self.model(model)  # another one after a reload
                except ServeError:
                    return
                yield b"event: status\ndata: " + await self._status_json(inference) + b"\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), 1.0)
        finally:
            self.watchers -= 1

    async def _status_json(self, inference: Inference) -> bytes:
        """The status, computed at most four times a second, however many dashboards are open."""
        name = inference.signature.name
        made, text = self._statuses.get(name, (0.0, b""))
        if time.monotonic() - made > 0.25 or not text:
            text = await asyncio.to_thread(lambda: _plain_json(inference.status()))
            self._statuses[name] = (time.monotonic(), text)
        return text

    # For followers

    async def standing(self, request: Request, follower: str, version: int = 0, model: str | None = None) -> Response:
        """What followers have to know, beside the snapshot."""
        inference = self._led(request, model)
        inference.followers.note(follower_name(follower), version)
        return await self._standing(inference)

    async def snapshot(self, request: Request, model: str | None = None) -> Response:
        """The published snapshot, in the format of the files of the state."""
        inference = self._led(request, model)
        content = await asyncio.to_thread(inference.service.snapshot)
        return Response(content, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    async def images(self, request: Request, follower: str, version: int = 0, model: str | None = None) -> Response:
        """Adapts to images that a follower answered; what it has to know comes back."""
        inference, name = self._led(request, model), follower_name(follower)
        taken = await receive(request, inference)
        inference.followers.note(name, version, len(taken))
        return await self._standing(inference)

    def _led(self, request: Request, model: str | None) -> Inference:
        inference = self.model(model)
        require_follower(request, self.settings.token, inference)
        return inference

    @staticmethod
    async def _standing(inference: Inference) -> Response:
        standing = await asyncio.to_thread(inference.service.standing)
        return Response(standing.write(), media_type="application/json")

    async def metrics_text(self) -> Response:
        """Metrics for Prometheus."""
        return Response(await asyncio.to_thread(self.metrics.text), headers={"Content-Type": CONTENT_TYPE})

    async def control(self, request: Request, action: str, model: str | None = None) -> Response:
        """Pauses, resumes, resets, rolls back, saves, or takes the models of the settings as they are now."""
        if action not in (*CONTROLS, RELOAD):
            raise ServeError(404, f"no control {action[:40]!r}; choose from: {', '.join((*CONTROLS, RELOAD))}")
        body = await self._operator_body(request)
        if action == RELOAD:
            await self.reload(model)
            return await self._done(RELOAD, model)
        service = self.model(model).service
        chosen = _rollback_version(body) if action == "rollback" else None
        act: Callable[[], None] = getattr(service, action)
        return await self._act(action, model, lambda: service.rollback(chosen) if action == "rollback" else act())

    async def camera(self, request: Request, name: str, model: str | None = None) -> Response:
        """Excludes a camera from adapting, lets it in again, or undoes what was learnt from it."""
        body = await self._operator_body(request)
        service = self.model(model).service
        if _wants_undo(body):
            return await self._act(f"camera {name!r} undone", model, lambda: service.undo(name))
        adapt = _adapt_flag(body)
        act = "opted in" if adapt else "opted out"
        return await self._act(f"camera {name!r} {act}", model, lambda: service.camera_opt_out(name, out=not adapt))

    async def _operator_body(self, request: Request) -> bytearray:
        """The body of a request that only operators may send."""
        middleware.check_site(request, self.settings.token)
        middleware.check_token(request, self.settings.token)
        with Lease(ModelBytes(self.pool)) as lease:
            return await read_body(request, lease, 4096, self.settings.body_timeout_seconds)

    async def _act(self, what: str, model: str | None, act: Callable[[], None]) -> Response:
        try:
            await asyncio.to_thread(act)
        except ValueError as error:
            raise ServeError(409, names_only(str(error))) from None
        return await self._done(what, model)

    async def _done(self, what: str, model: str | None) -> Response:
        log.info("%s by an operator%s", what, "" if model is None else f", of {model}")
        self._statuses.clear()
        if model is None and len(self.models) > 1:  # after a reload of all
            versions = {name: each.service.version for name, each in self.models.items()}
            return answer({"ok": True, "versions": versions})
        return answer({"ok": True, "version": self.model(model).service.version})


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
        "/api/models": state.summary,
        "/api/status": state.status,
        "/api/events": state.events,
        "/api/standing": state.standing,
        "/api/snapshot": state.snapshot,
        "/metrics": state.metrics_text,
    }
    post: dict[str, Callable[..., Any]] = {
        "/v2/repository/index": state.repository_index,
        f"{model}/infer": state.infer,
        f"{model}/versions/{{version}}/infer": state.infer,
        "/api/images": state.images,
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


async def _described(name: str, inference: Inference) -> dict[str, str]:
    """A model as Triton's index of the repository lists it."""
    try:
        await inference.require_ready()
        state, reason = "READY", ""
    except ServeError as error:
        state, reason = "UNAVAILABLE", error.text
    return {"name": name, "version": VERSION, "state": state, "reason": reason}


def _summary(described: dict[str, str], status: dict[str, Any]) -> dict[str, Any]:
    """A model in a line: whether it answers, and the figures of its status that say how it is."""
    figures = ("images", "adapted_images", "steps", "drift", "stalled")
    shown = ("method", "state", "version", *figures, "leader", "followers", "started", "now")
    last = status["series"][-1] if status["series"] else {}
    return {
        "name": described["name"],
        "ready": described["state"] == "READY",
        "reason": described["reason"],
        **{name: status[name] for name in shown},
        "cameras": len(status["cameras"]),
        "quarantined": sum(camera["quarantined"] is not None for camera in status["cameras"]),
        "images_per_second": last.get("images_per_second"),
    }


def _ignore(_: object) -> None:
    return None


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
