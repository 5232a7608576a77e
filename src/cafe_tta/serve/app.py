"""The server's HTTP: the Open Inference Protocol, health, metrics, the page and its controls."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

import cafe_tta
from cafe_tta.serve import guarding, page
from cafe_tta.serve.batcher import Batcher, Work
from cafe_tta.serve.body import Lease, PendingBytes, pack, read_body
from cafe_tta.serve.errors import ServeError, bad_request
from cafe_tta.serve.metrics import CONTENT_TYPE, Metrics
from cafe_tta.serve.pictures import prepare
from cafe_tta.serve.protocol import VERSION, Result, Signature, parse
from cafe_tta.serve.replies import reply
from cafe_tta.serve.service import Service
from cafe_tta.serve.settings import Settings

log = logging.getLogger(__name__)

EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration"]
QUICK = 64 * 1024  # bytes that may be parsed on the event loop
WATCHERS = 64  # pages that may watch at once
CONTROLS = ("pause", "resume", "reset", "rollback", "save")


class App:
    """The state of a running server, and what its addresses do."""

    def __init__(self, service: Service, signature: Signature, settings: Settings) -> None:
        self.service, self.signature, self.settings = service, signature, settings
        self.batcher: Batcher | None = None  # born on the event loop
        self.warm = False
        self.stopping = asyncio.Event()
        self.metrics = Metrics(service.status, lambda: 0 if self.batcher is None else self.batcher.images)
        self.pending = PendingBytes(settings.max_pending_bytes)
        self.decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode")
        self.active = 0  # requests that were begun and not answered
        self.watchers = 0
        self._status: tuple[float, bytes] = (0.0, b"")
        self._probing: asyncio.Future[bool] | None = None

    # Start and end

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(self.service.start)
        self.batcher = Batcher(
            self._answer,
            max_batch_size=self.settings.max_batch_size,
            max_queue_delay=self.settings.max_queue_delay_microseconds / 1e6,
            max_queue_size=self.settings.max_queue_size,
            timeout_action=self.settings.timeout_action,
            watch=self.metrics.batch,
        )
        warming = asyncio.create_task(self._probe())
        try:
            yield
        finally:
            warming.cancel()
            await self.drain()
            self.decoders.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self.service.close)

    async def drain(self) -> None:
        """Answers what was let in, refuses what comes, ends what never ends by itself."""
        if not self.stopping.is_set():
            self.stopping.set()
            end = time.monotonic() + self.settings.drain_seconds
            while self.active and time.monotonic() < end:  # those that are still sending are let in too
                await asyncio.sleep(0.01)
            if self.batcher is not None:
                await self.batcher.close()

    def _answer(self, batch: Sequence[Work]) -> list[Result]:
        """In the model's thread: a batch through the service, and to each request its own part."""
        images = batch[0].images if len(batch) == 1 else torch.cat([work.images for work in batch])
        cameras = [work.camera for work in batch for _ in range(len(work))]
        answers = self.service.answer(images, cameras, [work.adapt for work in batch for _ in range(len(work))])
        if len(answers.logits) != len(images) or not torch.isfinite(answers.logits).all():
            raise ValueError("the model's answer to these images is not finite; are they preprocessed as it needs?")
        probability, label = answers.logits.softmax(1).max(1)
        results, start = [], 0
        for work in batch:
            part = slice(start, start + len(work))
            start += len(work)
            results.append(
                Result(
                    answers.logits[part].numpy(),
                    label[part].numpy(),
                    probability[part].numpy(),
                    answers.version,
                    answers.drift[part][-1],
                    any(answers.adapted[part]),
                )
            )
        return results

    # The Open Inference Protocol

    async def server_metadata(self) -> Response:
        return answer({"name": "cafe-tta", "version": cafe_tta.__version__, "extensions": EXTENSIONS})

    async def live(self) -> Response:
        return Response()

    async def ready(self) -> Response:
        await self._require_ready()
        return Response()

    async def model_ready(self, name: str, version: str = VERSION) -> Response:
        self._require_model(name, version)
        return await self.ready()

    async def model_metadata(self, name: str, version: str = VERSION) -> Response:
        self._require_model(name, version)
        return answer(self.signature.metadata())

    async def model_configuration(self, name: str, version: str = VERSION) -> Response:
        self._require_model(name, version)
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

    async def infer(self, request: Request, name: str, version: str = VERSION) -> Response:
        started = time.monotonic()
        images, code = 0, 500
        self.active += 1
        try:
            with Lease(self.pending) as lease:
                response, images = await self._infer(request, name, version, lease, started)
            code = 200
            return response
        except ServeError as error:
            code = error.status
            raise
        finally:
            self.active -= 1
            seconds = time.monotonic() - started
            self.metrics.answered(code, seconds, images)
            if images:
                self.service.observe(images, seconds)

    async def _infer(
        self, request: Request, name: str, version: str, lease: Lease, started: float
    ) -> tuple[Response, int]:
        settings, batcher = self.settings, self.batcher

        def admit() -> None:
            guarding.check_site(request, settings.token)
            self._require_model(name, version)
            if not self.warm or batcher is None:
                raise ServeError(503, "the model is not ready yet", retry_after=1)
            batcher.check_room()

        body = await read_body(request, lease, settings.max_body_bytes, settings.body_timeout_seconds, admit)
        assert batcher is not None
        header = request.headers.get("inference-header-content-length")
        quick = len(body) <= QUICK or (header is not None and len(header) <= 5)
        parsed = (
            parse(body, header, self.signature)
            if quick
            else await self._decode(lambda: parse(body, header, self.signature))
        )
        timeout = settings.default_timeout_microseconds / 1e6
        if parsed.timeout is not None and settings.allow_timeout_override:
            timeout = min(timeout, parsed.timeout)
        with batcher.place(parsed.count):
            images = await self._decode(
                lambda: prepare(parsed, self.signature.preprocessing, settings.max_image_pixels)
            )
            left = timeout - (time.monotonic() - started)
            result = await batcher.submit(images, parsed.camera, parsed.adapt, left)
        accepted = request.headers.get("accept-encoding", "")
        numbers = parsed.count * self.signature.num_classes

        def write() -> Response:
            content, header_length = reply(parsed, result, self.signature)
            content, encoding = pack(content, accepted)
            media = "application/json" if header_length is None else "application/octet-stream"
            headers = {} if header_length is None else {"Inference-Header-Content-Length": str(header_length)}
            if encoding is not None:
                headers["Content-Encoding"] = encoding
            return Response(content, media_type=media, headers=headers)

        response = write() if numbers <= 4096 else await self._decode(write)
        return response, parsed.count

    # Looking on, and taking part

    async def page(self) -> Response:
        headers = {
            "Content-Security-Policy": page.csp(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return Response(page.html(), media_type="text/html", headers=headers)

    async def favicon(self) -> Response:
        return Response(page.FAVICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})

    async def status(self) -> Response:
        return Response(await self._status_json(), media_type="application/json")

    async def events(self) -> Response:
        if self.watchers >= WATCHERS:
            raise ServeError(503, f"{WATCHERS} pages watch already", retry_after=30)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._watch(), media_type="text/event-stream", headers=headers)

    async def _watch(self) -> AsyncIterator[bytes]:
        self.watchers += 1
        try:
            while not self.stopping.is_set():
                yield b"event: status\ndata: " + await self._status_json() + b"\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), 1.0)
        finally:
            self.watchers -= 1

    async def _status_json(self) -> bytes:
        """The status, made at most once in a while, however many watch."""
        made, text = self._status
        if time.monotonic() - made > 0.25 or not text:
            text = await asyncio.to_thread(lambda: _plain_json(self.service.status()))
            self._status = (time.monotonic(), text)
        return text

    async def metrics_text(self) -> Response:
        return Response(await asyncio.to_thread(self.metrics.text), headers={"Content-Type": CONTENT_TYPE})

    async def control(self, request: Request, action: str) -> Response:
        if action not in CONTROLS:
            raise ServeError(404, f"no control {action[:40]!r}; choose from: {', '.join(CONTROLS)}")
        guarding.check_site(request, self.settings.token)
        guarding.check_token(request, self.settings.token)
        with Lease(self.pending) as lease:
            body = await read_body(request, lease, 4096, self.settings.body_timeout_seconds)
        version = _rollback_version(body) if action == "rollback" else None
        act: Callable[[], None] = getattr(self.service, action)
        try:
            await asyncio.to_thread(lambda: self.service.rollback(version) if action == "rollback" else act())
        except ValueError as error:
            raise ServeError(409, str(error)) from None
        log.info("%s by an operator", action)
        self._status = (0.0, b"")
        return answer({"ok": True, "version": (await asyncio.to_thread(self.service.status))["version"]})

    # Helpers

    async def _decode(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.decoders, work)

    def _require_model(self, name: str, version: str) -> None:
        if name != self.signature.name:
            raise ServeError(404, f"no model {name[:100]!r}; this server has {self.signature.name!r}")
        if version != VERSION:
            raise ServeError(404, f"no version {version[:40]!r} of {name!r}; there is {VERSION!r}")

    async def _require_ready(self) -> None:
        if self.stopping.is_set():
            raise ServeError(503, "the server is shutting down", retry_after=5)
        if self.batcher is not None and self.batcher.stalled:
            raise ServeError(503, "the model does not answer", retry_after=5)
        if not self.warm or (self.batcher is not None and self.batcher.failing):
            if self._probing is None or self._probing.done():
                self._probing = asyncio.ensure_future(self._probe())
            if not await asyncio.shield(self._probing):
                raise ServeError(503, "the model is not ready: it did not answer an image", retry_after=1)

    async def _probe(self) -> bool:
        """Whether the model answers an image."""
        try:
            size = self.signature.preprocessing.size
            logits = await asyncio.to_thread(getattr(self.service, "probe", None) or (lambda i: self.service._front(i)[2]), torch.zeros(1, 3, size, size))
        except Exception:
            log.exception("the model did not answer an image")
            return False
        good = bool(torch.isfinite(logits).all())
        if good:
            self.warm = True
            if self.batcher is not None:
                self.batcher.failing = False
        return good


def create_app(state: App) -> FastAPI:
    """The application that uvicorn runs."""
    # No generated pages: they would load their scripts from elsewhere, and the protocol is documented already.
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
        app.add_api_route(path, state.infer, methods=["POST"], response_model=None)
    app.add_api_route("/api/{action}", state.control, methods=["POST"], response_model=None)
    guarding.install(app, state.settings.access_log)
    return app


def answer(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content).encode(), status, media_type="application/json")


def _as_configured(tensor: dict[str, Any]) -> dict[str, Any]:
    kind = {"BYTES": "STRING"}.get(tensor["datatype"], tensor["datatype"])
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"][1:] or [1]}


def _plain_json(status: Any) -> bytes:
    """JSON that every reader takes: no NaN, no infinity."""
    try:
        return json.dumps(status, allow_nan=False).encode()
    except ValueError:
        return json.dumps(json.loads(json.dumps(status), parse_constant=lambda _: None)).encode()


def _rollback_version(body: bytearray) -> int | None:
    if not body.strip():
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request('expected {"version": number} or nothing, but the body is no JSON') from None
    version = found.get("version") if isinstance(found, dict) else found
    if version is not None and type(version) is not int:
        raise bad_request(f'expected {{"version": number}} or nothing, but got {str(found)[:80]}')
    return version
