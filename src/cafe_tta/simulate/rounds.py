"""Plays a scenario against a server, one round after the other."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from cafe_tta.simulate.client import Client, RequestLost, Stopped
from cafe_tta.simulate.images import Images
from cafe_tta.simulate.play import Plan, Record
from cafe_tta.simulate.scenarios import Scenario, Sending

TICK = 0.2  # seconds after which a wait looks whether it should end


def play_rounds(
    plan: Plan, scenario: Scenario, rounds: int, seed: int, stopped: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, Record]]:
    """The number of the round, and the record, of every request of an honest camera, as it is answered.

    Requests of others count for nothing: the server may well refuse them.
    """
    images = Images(plan.images)
    client = Client(plan.url, plan.token, wait=lambda seconds: _wait(seconds, stopped))
    seconds = plan.duration / rounds
    start = time.monotonic()
    try:
        for number, sent in enumerate(scenario.rounds(images, rounds=rounds, seed=seed)):
            if plan.keeps_time and _wait(start + number * seconds - time.monotonic(), stopped):
                return
            for sending in sent:
                if stopped():
                    return
                record = _ask(client, plan.model, sending, number * seconds)
                if record is not None:
                    yield number, record
    except Stopped:
        return
    finally:
        client.close()


def _wait(seconds: float, stopped: Callable[[], bool]) -> bool:
    """Waits, and says whether to stop."""
    until = time.monotonic() + seconds
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, TICK))
    return stopped()


def _ask(client: Client, model: str, sending: Sending, due: float) -> Record | None:
    """The record of a request of an honest camera; None for others."""
    try:
        answer = client.classify(model, sending.images, sending.camera, sending.adapt)
    except RequestLost as error:
        return None if sending.honest is None else replace(_asked(sending, sending.honest, due), lost=str(error))
    if sending.honest is None:
        return None
    served = int((answer.labels == sending.labels).sum())
    return replace(
        _asked(sending, sending.honest, due),
        served=served,
        seconds=answer.seconds,
        busy=answer.busy,
        broken=answer.broken,
        version=answer.version,
    )


def _asked(sending: Sending, camera: int, due: float) -> Record:
    assert sending.labels is not None and sending.source is not None
    right = int((sending.source == sending.labels).sum())
    return Record(camera, due, len(sending.labels), right, served=0, seconds=0.0)
