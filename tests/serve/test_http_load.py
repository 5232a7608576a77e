"""Many clients at once, and the end of the server while they wait: each request gets one answer, its own."""

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from .http_server import PATIENCE, Files, Server, digits, infer, logits, shared_files, until


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return shared_files(tmp_path_factory)


def metric(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_under_overload_every_request_is_answered_once_with_its_own_answer(files):
    clients, each = 16, 6
    pixels = digits(clients * each * 3).reshape(clients, each, 3, 32, 32, 3)
    refused = []
    limits = ("--max-batch-size", "8", "--max-queue-size", "12", "--max-queue-delay-microseconds", "200")
    with Server("--model", files.model, "--stats", files.stats, "--no-adapt", *limits) as server:
        server.until_ready()

        def work(number: int) -> list[np.ndarray]:
            found = []
            with server.client() as client:
                for k in range(each):
                    while (answer := infer(client, pixels[number, k], f"{number}-{k}")).status_code == 429:
                        assert int(answer.headers["retry-after"]) >= 1
                        refused.append(answer.json()["error"])
                        time.sleep(0.02)  # far sooner than asked: the load is the point
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["id"] == f"{number}-{k}"
                    found.append(logits(answer))
            return found

        with ThreadPoolExecutor(clients) as threads:
            answers = np.array(list(threads.map(work, range(clients))))
        with server.client() as client:
            assert metric(client, 'cafe_tta_requests_total{code="200",model="small"}') == clients * each
            assert metric(client, 'cafe_tta_requests_total{code="429",model="small"}') == len(refused)
            assert metric(client, 'cafe_tta_images_total{model="small"}') == clients * each * 3
            assert metric(client, 'cafe_tta_waiting_images{model="small"}') == 0
        assert server.stop() == 0
    expected = files.logits(pixels.reshape(-1, 32, 32, 3)).reshape(answers.shape)
    np.testing.assert_allclose(answers, expected, atol=1e-4)
    assert refused
    assert "the queue is full" in refused[0]
    assert "Traceback" not in server.log


def test_a_signal_to_end_answers_all_that_was_let_in_and_ends_soon(files):
    waiting, gone = 20, 2
    pixels = digits(waiting)
    delay = ("--max-queue-delay-microseconds", "30000000")  # so that they wait when the signal comes
    with Server("--model", files.model, "--stats", files.stats, "--no-adapt", *delay) as server:
        server.until_ready()
        watched = threading.Event()

        def watch() -> bool:
            with server.client() as client, client.stream("GET", "/api/events") as events:
                for _ in events.iter_lines():
                    watched.set()
            return True  # the stream came to an end by itself

        def ask(number: int) -> httpx.Response:
            with server.client() as client:
                return infer(client, pixels[number : number + 1], str(number))

        for _ in range(gone):  # they do not wait for their answers, and harm nobody
            with httpx.Client(base_url=server.url, timeout=1) as client, pytest.raises(httpx.ReadTimeout):
                infer(client, pixels[:2], "gone")
        with ThreadPoolExecutor(waiting + 1) as threads:
            watcher = threads.submit(watch)
            answers = [threads.submit(ask, number) for number in range(waiting)]
            with server.client() as client:
                until(
                    lambda: metric(client, 'cafe_tta_waiting_images{model="small"}') == waiting + 2 * gone, "all are in"
                )
            assert watched.wait(PATIENCE)
            began = time.monotonic()
            assert server.stop(signal.SIGTERM) == 0
            took = time.monotonic() - began
            found = [answer.result() for answer in answers]
            assert watcher.result()
    assert [answer.status_code for answer in found] == [200] * waiting
    assert [answer.json()["id"] for answer in found] == [str(number) for number in range(waiting)]
    np.testing.assert_allclose(np.concatenate([logits(answer) for answer in found]), files.logits(pixels), atol=1e-4)
    assert took < 15  # less than they would have waited
    assert "Traceback" not in server.log
    assert server.lines[-1] == "stopped\n"
