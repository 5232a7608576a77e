"""From an inference request to its answer: reading, decoding, waiting for a batch, writing; and readiness."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import Request
from starlette.responses import Response
from torch import Tensor

from cafe_tta.serve.build import Built
from cafe_tta.serve.credentials import Credentials
from cafe_tta.serve.http.batcher import Batcher, Work
from cafe_tta.serve.http.body import Lease, ModelBytes, PendingBytes, pack, read_body
from cafe_tta.serve.http.metrics import Metrics, NamedCameras
from cafe_tta.serve.http.middleware import ServeError, check_site
from cafe_tta.serve.http.plain import is_plain, read_plain, recognised
from cafe_tta.serve.http.protocol import VERSION, InferRequest, Result, Signature, parse, prepare, reply, shown
from cafe_tta.serve.leader import Followers

log = logging.getLogger(__name__)

QUICK = 64 * 1024  # bytes that may be parsed, or pixels preprocessed, on the event loop
QUICK_NUMBERS = 4096  # numbers that may be written there


@dataclass
class Count:
    """What is counted of a request."""

    started: float
    images: int = 0  # that were answered


class Inference:
    """Answers the inference requests to one model. Lives on one event loop, once it is open."""

    def __init__(self, built: Built, metrics: Metrics, pool: PendingBytes) -> None:
        self.built, self.service, self.settings = built, built.service, built.service.settings
        self.signature = Signature.of(self.service, built.model.preprocessing)
        self.metrics = metrics.of(self.signature.name)
        self.followers = Followers()
        self.named_cameras = NamedCameras(self.settings.metrics_cameras)
        tokens = self.settings.camera_tokens
        self.credentials = None if tokens is None else Credentials(tokens)
        self.batcher: Batcher | None = None  # made on the event loop
        self.warm = False  # the model has answered an image
        self.stopping = asyncio.Event()
        self.pending = ModelBytes(pool)
        self._active = 0  # requests that have begun and are not answered yet
        self._decoders = ThreadPoolExecutor(self.settings.decode_threads, thread_name_prefix="decode")
        self._probing: asyncio.Future[bool] | None = None

    def open(self) -> None:
        self.batcher = Batcher(
            self._answer,
            max_batch_size=self.settings.max_batch_size,
            max_queue_delay=self.settings.max_queue_delay_microseconds / 1e6,
            max_queue_size=self.settings.max_queue_size,
            timeout_action=self.settings.timeout_action,
            watch=self._note_batch,
        )
        self._probing = asyncio.ensure_future(self._probe())

    def require_room(self, part: int) -> None:
        """Refuses settings whose largest request takes more bytes than all requests to this model may."""
        settings = self.settings
        largest = settings.max_body_bytes + settings.max_batch_size * self.signature.image_bytes
        if largest > part:
            raise ValueError(
                f"one request of max_batch_size = {settings.max_batch_size} images of {self.signature.name} takes up "
                f"to {largest} bytes, but all requests to it may take {part}, its part of max_pending_bytes = "
                f"{settings.max_pending_bytes}; lower the one or raise the other"
            )

    def status(self) -> dict[str, Any]:
        return self.service.status() | self.followers.describe()

    @property
    def waiting(self) -> int:
        """Images that wait for an answer."""
        return 0 if self.batcher is None else self.batcher.images

    async def drain(self) -> None:
        """Answers the admitted requests, within `drain_seconds`; then refuses the rest."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        if self.batcher is not None:
            self.batcher.hurry()
            end = time.monotonic() + self.settings.drain_seconds
            while self._active and time.monotonic() < end:  # those that are still sending are admitted too
                await asyncio.sleep(0.01)
            await self.batcher.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def infer(self, request: Request, version: str = VERSION) -> Response:
        with self.counted() as count, Lease(self.pending) as lease:

            def admit() -> None:
                check_site(request, self.settings.token)
                self.admit(version)

            limit, patience = self.settings.max_body_bytes, self.settings.body_timeout_seconds
            body = await read_body(request, lease, limit, patience, admit)
            parsed = await self._parse(request, body)
            authorization = request.headers.get("authorization", "")
            result = await self.answer(parsed, authorization, lease, len(body), count.started)
            accepted = request.headers.get("accept-encoding", "")
            if parsed.count * self.signature.num_classes <= QUICK_NUMBERS:
                response = self._write(parsed, result, accepted)
            else:
                response = await self.decode(lambda: self._write(parsed, result, accepted))
            count.images = parsed.count
            return response

    def admit(self, version: str) -> None:
        """Refuses a request that cannot be answered, before its images are read."""
        self.require_version(version)
        self.require_batcher().check_room()

    def require_batcher(self) -> Batcher:
        """The queue before the model, once that is ready."""
        if not self.warm or self.batcher is None:
            raise ServeError(503, "the model is not ready yet", retry_after=1)
        return self.batcher

    async def answer(self, parsed: InferRequest, authorization: str, lease: Lease, held: int, started: float) -> Result:
        """The answer to a request that was admitted, and whose body holds so many bytes."""
        batcher, settings = self.batcher, self.settings
        assert batcher is not None
        verified = self.verify(parsed.camera, authorization)
        timeout = settings.default_timeout_microseconds / 1e6
        if parsed.timeout is not None and settings.allow_timeout_override:
            timeout = min(timeout, parsed.timeout)
        with batcher.reserve(parsed.count):
            lease.grow_to(held + parsed.count * self.signature.image_bytes)

            def make() -> Tensor:
                return prepare(parsed, self.signature.preprocessing, settings.max_image_pixels)

            images = make() if self._is_quick(parsed) else await self.decode(make)
            left = timeout - (time.monotonic() - started)
            return await batcher.submit(images, parsed.camera, parsed.adapt, left, verified)

    def verify(self, camera: str, authorization: str) -> bool:
        """Whether a request came with its camera's token; refuses names that are bound to another client."""
        if self.credentials is None:
            return False
        kind, _, token = authorization.partition(" ")
        if self.credentials.knows(camera):
            if kind.lower() == "bearer" and self.credentials.fits(camera, token.strip()):
                return True
            given = "its token is wrong" if authorization else "this needs the header Authorization: Bearer …"
            raise ServeError(401, f"the camera {shown(camera)} has a token: {given}")
        if self.settings.unknown_cameras == "refuse":
            raise ServeError(401, f"no camera {shown(camera)} is known here, and others are refused (unknown_cameras)")
        return False

    @contextmanager
    def counted(self) -> Iterator["Count"]:
        """Counts a request, from its beginning to its answer."""
        count, code = Count(time.monotonic()), 500
        try:
            with self.occupied():
                yield count
            code = 200
        except ServeError as error:
            code = error.status
            raise
        finally:
            seconds = time.monotonic() - count.started
            self.metrics.answered(code)
            self.metrics.request_seconds.observe(seconds)
            self.metrics.images.inc(count.images)
            if count.images:
                self.service.observe(count.images, seconds)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Keeps the model until a request is answered."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    async def _parse(self, request: Request, body: bytearray) -> InferRequest:
        content_type = recognised(body, request.headers.get("content-type", ""))
        if is_plain(content_type):
            return read_plain(body, content_type, request.query_params, self.signature)
        header = request.headers.get("inference-header-content-length")
        if len(body) <= QUICK or (header is not None and len(header) <= 5):
            return parse(body, header, self.signature)
        parsed: InferRequest = await self.decode(lambda: parse(body, header, self.signature))
        return parsed

    def _is_quick(self, request: InferRequest) -> bool:
        """Whether its images are preprocessed in less time than a change of threads takes."""
        pixels, side = request.pixels, self.signature.preprocessing.size
        return pixels is not None and pixels.size <= QUICK and (side, side) in (pixels.shape[1:3], pixels.shape[2:])

    async def decode(self, work: Callable[[], Any]) -> Any:
        """Slow work, in a thread beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, work)

    def _write(self, request: InferRequest, result: Result, accepted: str) -> Response:
        content, header_length = reply(request, result, self.signature)
        content, encoding = pack(content, accepted)
        media = "application/json" if header_length is None else "application/octet-stream"
        headers = {} if header_length is None else {"Inference-Header-Content-Length": str(header_length)}
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        return Response(content, media_type=media, headers=headers)

    def _answer(self, batch: Sequence[Work]) -> list[Result]:
        """Runs in the model's thread: passes a batch to the service, and gives each request its own part."""
        images = batch[0].images if len(batch) == 1 else torch.cat([work.images for work in batch])
        images = images.to(self.signature.device)
        cameras = [work.camera for work in batch for _ in range(len(work))]
        adapt = [work.adapt for work in batch for _ in range(len(work))]
        requests = [work.request for work in batch for _ in range(len(work))]
        verified = [work.verified for work in batch for _ in range(len(work))]
        answers = self.service.answer(images, cameras, adapt, requests, verified)
        if len(answers.logits) != len(images) or not torch.isfinite(answers.logits).all():
            raise ValueError("the model's answer to these images is not finite; are they preprocessed as it needs?")
        results, start = [], 0
        for work in batch:
            part = slice(start, start + len(work))
            start += len(work)
            results.append(
                Result(
                    answers.logits[part].numpy(),
                    answers.labels[part].numpy(),
                    answers.probabilities[part].numpy(),
                    answers.versions[part][0],
                    answers.drift[part][-1],
                    any(answers.adapted[part]),
                )
            )
        return results

    def _note_batch(self, images: int, waited: float, took: float) -> None:
        self.metrics.batch_images.observe(images)
        self.metrics.queue_seconds.observe(waited)
        self.metrics.batch_seconds.observe(took)

    # Readiness

    def require_version(self, version: str) -> None:
        if version != VERSION:
            name = self.signature.name
            raise ServeError(404, f"no version {version[:40]!r} of {name!r}; there is {VERSION!r}")

    async def require_ready(self) -> None:
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
            image = torch.zeros(1, 3, size, size, device=self.signature.device)
            logits = await asyncio.to_thread(self.service.probe, image)
        except Exception:
            log.exception("the model did not answer an image")
            return False
        good = bool(torch.isfinite(logits).all())
        if good:
            self.warm = True
            if self.batcher is not None:
                self.batcher.failing = False
        return good
