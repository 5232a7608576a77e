"""Plays the cameras: in several processes, each camera at its own times, with a record of every request."""

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cafe_tta.simulate.client import Client, RequestLost, Stopped
from cafe_tta.simulate.images import Images
from cafe_tta.simulate.weather import Camera, shots

START_WITHIN = 300.0  # seconds that processes have to load; a busy machine is slow


@dataclass(frozen=True)
class Plan:
    """What all cameras have in common."""

    url: str
    model: str
    token: str | None
    images: Path  # folder of the prepared images
    duration: float  # seconds
    period: float  # seconds of one round of its weather
    images_per_request: int
    keeps_time: bool = True  # sends at its own times; else every camera sends as fast as it is answered


@dataclass(frozen=True)
class Record:
    """The outcome of one request."""

    camera: int
    time: float  # when it was due, in seconds since the beginning
    images: int
    source: int  # images that the unadapted model classifies correctly
    served: int  # images that the server classified correctly
    seconds: float  # latency
    busy: int = 0
    broken: int = 0
    version: int | None = None
    lost: str = ""  # why it was not answered


def play(
    plan: Plan,
    cameras: Sequence[Camera],
    processes: int,
    stopped: Callable[[], bool] = lambda: False,
    begun: Callable[[], None] = lambda: None,
) -> Iterator[Record]:
    """Plays all cameras, and yields a record of every request as it is answered, until all have ended.

    `begun` is called when all processes are ready and the clock starts; `stopped` says whether to end early.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    results: Any = context.Queue()
    processes = min(processes, len(cameras))
    parts = [[(n, c) for n, c in enumerate(cameras) if n % processes == rank] for rank in range(processes)]
    pipes = [context.Pipe(duplex=False) for _ in parts]
    orders = _Orders([sender for _, sender in pipes])
    workers = [
        context.Process(target=_work, args=(plan, part, results, receiver), daemon=True)
        for part, (receiver, _) in zip(parts, pipes, strict=True)
    ]
    try:
        for worker, (receiver, _) in zip(workers, pipes, strict=True):
            worker.start()
            receiver.close()  # this process's copy of it
        yield from _collect(workers, results, orders, stopped, begun)
    finally:
        orders.stop()
        for worker in workers:
            if worker.pid is not None:
                worker.join(timeout=5)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


class _Orders:
    """What the processes are told: to begin, and to stop. Nobody waits for one that is gone, as an Event would."""

    def __init__(self, senders: Sequence[Any]) -> None:
        self._senders = senders
        self.stopped = False

    def begin(self) -> None:
        self._tell("begin")

    def stop(self) -> None:
        if not self.stopped:
            self._tell("stop")
        self.stopped = True

    def _tell(self, word: str) -> None:
        for sender in self._senders:
            with suppress(OSError):  # it is gone
                sender.send(word)


def _collect(
    workers: Sequence[Any],
    results: Any,
    orders: _Orders,
    stopped: Callable[[], bool],
    begun: Callable[[], None],
) -> Iterator[Record]:
    loading, playing = len(workers), len(workers)
    deadline = time.monotonic() + START_WITHIN
    while playing:
        if stopped():
            orders.stop()
        try:
            message = results.get(timeout=0.2)
        except queue.Empty:
            dead = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0)]
            if orders.stopped and all(worker.exitcode is not None for worker in workers):
                return  # a signal to the whole group ended them before they could report it
            if dead and not orders.stopped:
                raise RuntimeError(f"a process of the simulation ended by itself, with code {dead[0]}") from None
            if loading and time.monotonic() > deadline:
                raise RuntimeError(f"the processes did not start within {START_WITHIN:.0f} s") from None
            continue
        if message == "ready":
            loading -= 1
            if not loading:
                begun()
                orders.begin()  # all clocks start together
        elif message == "end":
            playing -= 1
        elif isinstance(message, str):
            raise RuntimeError(message)
        else:
            yield from message


def _work(plan: Plan, cameras: list[tuple[int, Camera]], results: Any, orders: Any) -> None:
    """One process: a thread for each of its cameras, which mostly wait."""
    for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: for the parent, which then says stop
        signal.signal(number, signal.SIG_IGN)
    begin, stop = threading.Event(), threading.Event()
    threading.Thread(target=_listen, args=(orders, begin, stop), daemon=True).start()
    try:
        images = Images(plan.images)
        results.put("ready")
        begin.wait()
        start = time.monotonic()
        outbox = _Outbox(results)
        threads = [threading.Thread(target=_camera, args=(plan, n, c, images, start, stop, outbox)) for n, c in cameras]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outbox.flush()
        results.put("end")
    except Exception as error:
        results.put(f"a process of the simulation failed: {type(error).__name__}: {error}")


def _listen(orders: Any, begin: threading.Event, stop: threading.Event) -> None:
    """Waits for orders; where the parent is gone, it is time to stop."""
    word = "begin"
    while word == "begin":
        try:
            word = orders.recv()
        except (EOFError, OSError):
            word = "stop"
        (stop if word == "stop" else begin).set()
    begin.set()


class _Outbox:
    """Sends records in groups: a message for each would cost as much as the request."""

    def __init__(self, results: Any) -> None:
        self._results, self._lock = results, threading.Lock()
        self._waiting: list[Record] = []
        self._sent = time.monotonic()

    def put(self, record: Record) -> None:
        with self._lock:
            self._waiting.append(record)
            if time.monotonic() - self._sent < 0.2:
                return
        self.flush()

    def flush(self) -> None:
        with self._lock:
            if self._waiting:
                self._results.put(self._waiting)
            self._waiting, self._sent = [], time.monotonic()


def _camera(
    plan: Plan, number: int, camera: Camera, images: Images, start: float, stop: threading.Event, outbox: _Outbox
) -> None:
    client = Client(plan.url, plan.token, wait=stop.wait)
    for shot in shots(
        camera,
        duration=plan.duration,
        period=plan.period,
        pool=len(images),
        images_per_request=plan.images_per_request,
    ):
        wait = start + shot.time - time.monotonic()
        if stop.wait(wait if plan.keeps_time and wait > 0 else 0):
            break
        labels = images.labels[shot.images]
        right = int((images.source[shot.domain][shot.images] == labels).sum())
        asked = Record(number, shot.time, len(labels), right, served=0, seconds=0.0)
        try:
            answer = client.classify(plan.model, images.take(shot.domain, shot.images), camera.name)
        except Stopped:
            break
        except RequestLost as error:
            outbox.put(replace(asked, lost=str(error)))
        except Exception as error:  # a thread that dies silently would look like a camera without images
            outbox.put(replace(asked, lost=f"{type(error).__name__}: {error}"))
        else:
            served = int((answer.labels == labels).sum())
            outbox.put(
                replace(
                    asked,
                    served=served,
                    seconds=answer.seconds,
                    busy=answer.busy,
                    broken=answer.broken,
                    version=answer.version,
                )
            )
    client.close()
