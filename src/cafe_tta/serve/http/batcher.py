"""Dynamic batching: the images of requests that arrive close together are answered in one batch.

One thread owns the model; while it works on a batch, the next one fills. The settings have Triton's names. Images are
counted, not requests. Every admitted request gets exactly one answer: its own, or an error.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from cafe_tta.serve.events import names_only, request_id
from cafe_tta.serve.http.middleware import ServeError, bad_request
from cafe_tta.serve.http.protocol import Result

log = logging.getLogger(__name__)

STALLED = 30.0  # seconds that a batch may take before the server is called unready
LONGEST_RETRY = 30  # seconds


@dataclass(eq=False)
class Work:
    """The images of one request, and the future of their answer."""

    images: Tensor
    camera: str
    adapt: bool
    deadline: float  # on the clock of time.monotonic
    answer: "asyncio.Future[Result]"
    verified: bool = False  # it came with its camera's token
    request: str = field(default_factory=request_id.get)  # its id, for the log
    queued: float = field(default_factory=time.monotonic)
    taken: bool = False  # into a batch: its answer is being computed

    def __len__(self) -> int:
        return len(self.images)


# Runs in the model's thread; raises ValueError where the images are the cause.
Model = Callable[[Sequence[Work]], list[Result]]
Watch = Callable[[int, float, float], None]  # images of a batch, seconds that its oldest waited, seconds that it took


class Batcher:
    """The queue before the model. Lives on one event loop."""

    def __init__(
        self,
        model: Model,
        *,
        max_batch_size: int,
        max_queue_delay: float,  # seconds
        max_queue_size: int,
        timeout_action: Literal["reject", "delay"] = "reject",
        watch: Watch = lambda images, waited, took: None,
    ) -> None:
        self._model = model
        self._max_batch_size = max_batch_size
        self._max_queue_delay = max_queue_delay
        self._max_queue_size = max_queue_size
        self._rejects = timeout_action == "reject"
        self._watch = watch
        self._queue: deque[Work] = deque()
        self._overdue: deque[Work] = deque()  # with "delay": answered when the queue is empty
        self._waiting = 0  # images in either queue
        self._images = 0  # images admitted and not answered yet
        self._changed = asyncio.Event()
        self._hurried = self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._rate = 0.0  # images per second, smoothed
        self._busy_since: float | None = None
        self.failing = False  # the last batch failed inside the model, not because of its images
        self._task = asyncio.get_running_loop().create_task(self._work())

    @property
    def images(self) -> int:
        """Images that wait for an answer."""
        return self._images

    @property
    def stalled(self) -> bool:
        return self._busy_since is not None and time.monotonic() - self._busy_since > STALLED

    def retry_after(self) -> int:
        """Seconds after which a refused client may find room."""
        seconds = self._images / self._rate if self._rate else 1.0
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY)

    def check_room(self, images: int = 1) -> None:
        """Refuses images for which the queue has no room."""
        if self._closing:
            raise ServeError(503, "the server is shutting down", retry_after=5)
        if self._images + images > self._max_queue_size:
            raise ServeError(
                429,
                f"the queue is full: {self._images} of {self._max_queue_size} images wait (max_queue_size); "
                "try again later",
                retry_after=self.retry_after(),
            )

    @contextmanager
    def reserve(self, images: int) -> Iterator[None]:
        """Reserves room in the queue for images, from before they are decoded until they are answered."""
        self.check_room(images)
        self._images += images
        try:
            yield
        finally:
            self._images -= images

    async def submit(
        self,
        images: Tensor,
        camera: str,
        adapt: bool,
        timeout: float,
        verified: bool = False,
        request: str | None = None,
    ) -> Result:
        """The answer to the images of a request, for which room was reserved; `request` is its id, if another."""
        if self._closing:
            raise ServeError(503, "the server is shutting down", retry_after=5)
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        known = request_id.get() if request is None else request
        work = Work(images, camera, adapt, time.monotonic() + timeout, answer, verified, known)
        self._queue.append(work)
        self._waiting += len(work)
        self._changed.set()
        if not self._rejects:
            return await answer
        alarm = asyncio.get_running_loop().call_later(timeout, self._too_late, work)
        try:
            return await answer
        finally:
            alarm.cancel()

    @staticmethod
    def _too_late(work: Work) -> None:
        if not work.taken:
            waited = time.monotonic() - work.queued
            _refuse(work, ServeError(504, f"no answer within the time-out: waited {waited:.2f} s in the queue"))

    def hurry(self) -> None:
        """Stop waiting to fill batches (shutting down)."""
        self._hurried = True
        self._changed.set()

    async def close(self) -> None:
        """Admits no more requests, and refuses those that still wait."""
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for work in (*self._queue, *self._overdue):
            _refuse(work, ServeError(503, "the server is shutting down", retry_after=5))
        self._queue.clear()
        self._overdue.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The loop

    async def _work(self) -> None:
        while True:
            batch = await self._gather()
            if not batch:
                continue
            try:
                await self._run(batch)
            except asyncio.CancelledError:
                for work in batch:
                    _refuse(work, ServeError(503, "the server is shutting down", retry_after=5))
                raise
            except BaseException as error:  # a bug here: but no client may wait indefinitely
                log.exception("the batcher failed")
                for work in batch:
                    _refuse(work, ServeError(500, f"internal error: {type(error).__name__}"))

    async def _gather(self) -> list[Work]:
        """The next batch: as soon as it is full, or its oldest has waited long enough."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        end = min(work.queued for queue in (self._queue, self._overdue) for work in queue) + self._max_queue_delay
        while self._waiting < self._max_batch_size and not self._hurried:
            left = end - time.monotonic()
            if left <= 0:
                break
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        return self._take()

    def _take(self) -> list[Work]:
        """From the front of the queue, in order, as much as fits."""
        now, size = time.monotonic(), 0
        batch: list[Work] = []
        for queue in (self._queue, self._overdue):
            while queue:
                work = queue[0]
                late = queue is self._queue and now > work.deadline and not work.answer.done()
                if late and self._rejects:
                    self._too_late(work)
                gone = work.answer.done()  # too late, or cancelled by its client
                delayed = late and not gone
                if batch and not gone and not delayed and size + len(work) > self._max_batch_size:
                    break
                queue.popleft()
                if delayed:
                    self._overdue.append(work)
                    continue
                self._waiting -= len(work)
                if not gone:
                    work.taken = True
                    batch.append(work)
                    size += len(work)
            if queue:
                break
        return batch

    async def _run(self, batch: list[Work]) -> None:
        started = time.monotonic()
        self._busy_since = started
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, batch)
        finally:
            self._busy_since = None
        took = time.monotonic() - started
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Result):
                if not work.answer.done():
                    work.answer.set_result(outcome)
            else:
                _refuse(work, outcome)
        images = sum(map(len, batch))
        self._rate += (images / max(took, 1e-6) - self._rate) * (0.2 if self._rate else 1.0)
        self._watch(images, started - min(work.queued for work in batch), took)

    def _answer(self, batch: Sequence[Work]) -> list[Result | ServeError]:
        """Runs in the model's thread. If a batch fails, each request is tried alone: only the cause gets an error."""
        try:
            results = list(self._model(batch))
            self.failing = False
            return list(results)
        except Exception as error:
            if len(batch) > 1:
                return [outcome for work in batch for outcome in self._answer([work])]
            if isinstance(error, ValueError):
                return [bad_request(names_only(str(error)))]
            self.failing = True
            log.exception("the model failed on %d images", len(batch[0]))
            return [ServeError(500, f"the model failed: {type(error).__name__}; the server's log says more")]


def _refuse(work: Work, error: ServeError) -> None:
    if not work.answer.done():
        work.answer.set_exception(error)
