"""The queue before the model: what is put together, what is refused, and who suffers from a failure."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from cafe_tta.serve.http.batcher import Batcher
from cafe_tta.serve.http.middleware import ServeError
from cafe_tta.serve.http.protocol import Result


class Model:
    """Answers every image with its own first value; fails where that is negative; waits while it is held."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free = threading.Event()
        self.free.set()

    def __call__(self, batch):
        assert self.free.wait(60)
        values = [work.images[:, 0].numpy() for work in batch]
        if any((value == -1).any() for value in values):
            raise ValueError("a bad image")
        if any((value == -2).any() for value in values):
            raise RuntimeError("a broken model")
        self.batches.append([len(work) for work in batch])
        return [Result(value[:, None], value.astype(np.int64), value, 0, None, False) for value in values]


def images(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def run(test, **options):
    """Runs a coroutine with a batcher and its model."""

    async def main():
        model = Model()
        settings = {"max_batch_size": 4, "max_queue_delay": 0.0, "max_queue_size": 8} | options
        batcher = Batcher(model, **settings)
        try:
            return await test(batcher, model)
        finally:
            model.free.set()
            await batcher.close()

    return asyncio.run(main())


async def ask(batcher: Batcher, *values: float, timeout: float = 60.0) -> list[int]:
    with batcher.reserve(len(values)):
        return (await batcher.submit(images(*values), "camera", True, timeout)).label.tolist()


async def error_of(answer) -> tuple[int, str]:
    with pytest.raises(ServeError) as caught:
        await answer
    return caught.value.status, caught.value.text


async def held(batcher: Batcher, model: Model) -> asyncio.Task:
    """A request that the model works on until it is set free."""
    model.free.clear()
    task = asyncio.create_task(ask(batcher, 100))
    while batcher._busy_since is None:
        await asyncio.sleep(0.001)
    return task


def test_batches_gather_while_the_model_works_and_count_images():
    async def test(batcher, model):
        first = await held(batcher, model)
        rest = [asyncio.create_task(ask(batcher, *values)) for values in ((1, 2), (3,), (4, 5), (6,))]
        await asyncio.sleep(0)
        model.free.set()
        assert [await task for task in (first, *rest)] == [[100], [1, 2], [3], [4, 5], [6]]
        return model.batches

    assert run(test) == [[1], [2, 1], [2, 1]]  # in order; 2 + 1 + 2 would be more than 4


def test_a_batch_waits_for_others_no_longer_than_it_is_told():
    async def test(batcher, model):
        began = time.monotonic()
        answers = [asyncio.create_task(ask(batcher, value)) for value in (1, 2)]
        assert [await answer for answer in answers] == [[1], [2]]
        alone = time.monotonic() - began
        began = time.monotonic()
        await asyncio.gather(*(ask(batcher, value) for value in range(4)))  # full: no reason to wait
        return model.batches, alone, time.monotonic() - began

    batches, alone, full = run(test, max_queue_delay=0.5)
    assert batches == [[1, 1], [1, 1, 1, 1]]
    assert alone >= 0.5
    assert full < 0.5


def test_what_finds_no_room_is_refused_with_a_time_to_come_again():
    async def test(batcher, model):
        first = await held(batcher, model)
        rest = [asyncio.create_task(ask(batcher, 1, 2, 3)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ServeError, match="the queue is full: 7 of 8 images wait") as caught:
            await ask(batcher, 1, 2)
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        rest.append(asyncio.create_task(ask(batcher, 9)))  # one still fits
        await asyncio.sleep(0)
        model.free.set()
        await asyncio.gather(first, *rest)
        assert batcher.images == 0

    run(test)


def test_only_the_guilty_request_of_a_batch_suffers():
    async def test(batcher, model):
        first = await held(batcher, model)
        rest = [asyncio.create_task(ask(batcher, value)) for value in (1, -1, -2, 4)]
        await asyncio.sleep(0)
        model.free.set()
        assert await first == [100]
        assert await rest[0] == [1]
        assert await error_of(rest[1]) == (400, "a bad image")
        status, text = await error_of(rest[2])
        assert (status, "RuntimeError" in text) == (500, True)
        assert await rest[3] == [4]
        assert not batcher.failing  # it answered the last one

    run(test)


def test_who_waited_too_long_is_refused_at_once_even_while_the_model_works():
    async def test(batcher, model):
        first = await held(batcher, model)
        status, text = await error_of(ask(batcher, 1, timeout=0.01))  # the model is still held
        assert (status, "no answer within the time-out" in text) == (504, True)
        model.free.set()
        assert await first == [100]  # what the model has begun is answered
        assert await ask(batcher, 5) == [5]
        return model.batches

    assert run(test) == [[1], [1]]  # nobody worked for the one that was refused


def test_or_is_put_behind_the_others():
    async def test(batcher, model):
        first = await held(batcher, model)
        late = asyncio.create_task(ask(batcher, 1, 2, timeout=0.0))
        await asyncio.sleep(0.01)
        rest = [asyncio.create_task(ask(batcher, *values)) for values in ((3, 4, 5), (6, 7))]
        await asyncio.sleep(0)
        model.free.set()
        assert [await task for task in (first, late, *rest)] == [[100], [1, 2], [3, 4, 5], [6, 7]]
        return model.batches

    assert run(test, timeout_action="delay") == [[1], [3], [2, 2]]


def test_at_the_end_nobody_is_left_waiting():
    async def test(batcher, model):
        first = await held(batcher, model)
        waiting = asyncio.create_task(ask(batcher, 1))
        await asyncio.sleep(0)
        await batcher.close()
        assert await error_of(first) == (503, "the server is shutting down")
        assert await error_of(waiting) == (503, "the server is shutting down")
        assert await error_of(ask(batcher, 2)) == (503, "the server is shutting down")
        assert batcher.images == 0

    run(test)
