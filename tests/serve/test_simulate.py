"""The simulated cameras: what they send, how they ask, and what is told of it in the end."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cafe_tta.cli.app import app
from cafe_tta.simulate import client as asking
from cafe_tta.simulate.client import Client, RequestLost, Stopped
from cafe_tta.simulate.play import Plan, Record, play
from cafe_tta.simulate.simulation import Silence
from cafe_tta.simulate.summary import Summary
from cafe_tta.simulate.weather import CLEAN, WEATHER, make_cameras, shots

from .http_server import Server, digits, make_files

PATIENCE = 180.0  # seconds: on a machine that has other things to do


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | (env or {})
    command = [sys.executable, "-m", "cafe_tta", "simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * PATIENCE)


# What cameras see


def all_shots(seed: int = 0, **changes: float) -> list[list[tuple[float, list[int], object]]]:
    options = {"duration": 60.0, "period": 20.0, "pool": 50, "images_per_request": 3} | changes
    cameras = make_cameras(10, rate=20, seed=seed)
    return [[(s.time, s.images.tolist(), s.domain) for s in shots(camera, **options)] for camera in cameras]


def test_the_seed_decides_everything_that_is_sent():
    assert all_shots(seed=3) == all_shots(seed=3)
    assert all_shots(seed=3) != all_shots(seed=4)


def test_cameras_have_names_rates_and_weather_of_their_own():
    cameras = make_cameras(10, rate=20)
    assert len({camera.name for camera in cameras}) == 10
    assert len({camera.rate for camera in cameras}) == 10
    assert all(10 <= camera.rate <= 30 for camera in cameras)
    assert {camera.weather.name for camera in cameras} == set(WEATHER)


def test_arrivals_are_poisson_at_the_camera_rate():
    camera = make_cameras(1, rate=40)[0]
    times = np.array([s.time for s in shots(camera, duration=500, period=50, pool=9, images_per_request=2)])
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(2 / camera.rate, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of an exponential distribution
    assert times.max() < 500


def test_fog_comes_and_goes():
    seen = [WEATHER["fog"].at(step / 40)[1] for step in range(40)]
    assert max(seen) == 5
    assert seen.count(0) >= 20
    assert all(abs(a - b) <= 1 for a, b in pairwise(seen))  # it thickens, it does not jump


@given(st.sampled_from(sorted(WEATHER)), st.floats(0, 1e4))
def test_every_domain_of_the_weather_is_known_beforehand(name, time):
    assert WEATHER[name].at(time) in WEATHER[name].domains()


@pytest.mark.parametrize(("count", "rate"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_impossible_cameras_are_refused(count, rate):
    with pytest.raises(ValueError, match="expected"):
        make_cameras(count, rate)


# How they ask: a server of the test's own, that misbehaves as told


class Script:
    """Answers to give to inference requests, one after the other; the last is repeated."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = list(answers), 0
        self.lock = threading.Lock()

    def next(self) -> object:
        with self.lock:
            self.asked += 1
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def scripted(*answers: object) -> Iterator[tuple[str, Script]]:
    script = Script(*answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, code: int, body: bytes, **headers: str) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            found = {"name": "small", "outputs": [{"name": "logits", "shape": [-1, 10]}]}
            listed = self.path == "/v2/repository/index"
            self.reply(200, json.dumps([found] if listed else found).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            header = json.loads(body[: int(self.headers["Inference-Header-Content-Length"])])
            answer = script.next()
            if answer == "break":
                self.connection.close()
                self.close_connection = True
            elif answer == "busy":
                self.reply(429, b'{"error": "the queue is full"}', Retry_After="0.01")
            elif answer == "fail":
                self.reply(500, b'{"error": "the model failed"}')
            elif isinstance(answer, bytes):
                self.reply(200, answer)
            else:
                count = header["inputs"][0]["shape"][0]
                labels = np.full(count, answer, "<i8").tobytes()
                output = {"name": "label", "datatype": "INT64", "shape": [count]}
                output["parameters"] = {"binary_data_size": len(labels)}
                text = json.dumps({"outputs": [output], "parameters": {"model_version": 7}}).encode()
                self.reply(200, text + labels, Inference_Header_Content_Length=str(len(text)))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_busy_server_and_a_broken_connection_are_tried_again_and_counted():
    with scripted("busy", "break", "busy", 4) as (url, script):
        client = Client(url)
        answer = client.classify("small", digits(3), "gate")
        client.close()
    assert answer.labels.tolist() == [4, 4, 4]
    assert (answer.busy, answer.broken, answer.version) == (2, 1, 7)
    assert script.asked == 4


def test_an_error_of_the_server_is_a_lost_request():
    with scripted("fail") as (url, script):
        client = Client(url)
        with pytest.raises(RequestLost, match="500: the model failed"):
            client.classify("small", digits(1), "gate")
        client.close()
    assert script.asked == 1


def test_a_server_that_stays_busy_loses_the_request_in_the_end(monkeypatch):
    monkeypatch.setattr(asking, "LOST_AFTER", 0.2)
    with scripted("busy") as (url, _):
        client = Client(url)
        with pytest.raises(RequestLost, match="given up.*429: the queue is full"):
            client.classify("small", digits(1), "gate")
        client.close()


def test_waiting_for_a_busy_server_can_be_stopped():
    with scripted("busy") as (url, _):
        client = Client(url, wait=lambda seconds: True)
        with pytest.raises(Stopped):
            client.classify("small", digits(1), "gate")
        client.close()


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"outputs": []}', b'{"outputs": [{"name": "label", "data": ["x"]}]}'])
def test_an_answer_that_cannot_be_read_is_a_lost_request(answer):
    with scripted(answer) as (url, _):
        client = Client(url)
        with pytest.raises(RequestLost, match="answer"):
            client.classify("small", digits(1), "gate")
        client.close()


def test_answers_for_other_images_than_were_sent_are_a_lost_request():
    with scripted(b'{"outputs": [{"name": "label", "data": [1, 2]}]}') as (url, _):
        client = Client(url)
        with pytest.raises(RequestLost, match="3 images were sent, but 2 answers came"):
            client.classify("small", digits(3), "gate")
        client.close()


@pytest.mark.parametrize("url", ["", "ftp://there", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="expected `url`"):
        Client(url)


# What is told


def test_a_summary_counts_images_by_camera_and_time_and_leaves_lost_requests_out():
    summary = Summary(make_cameras(2, 10), duration=10, blocks=2)
    summary.add(Record(0, 1.0, 4, source=2, served=3, seconds=0.010, busy=2, version=0))
    summary.add(Record(1, 9.0, 4, source=4, served=3, seconds=0.030, version=5))
    summary.add(Record(1, 9.5, 4, source=4, served=0, seconds=0.0, lost="500: no"))
    numbers = summary.numbers(wall_seconds=10)
    assert numbers["overall"]["images"] == 8
    assert (numbers["overall"]["source_accuracy"], numbers["overall"]["served_accuracy"]) == (75.0, 75.0)
    assert [camera["gain"] for camera in numbers["cameras"]] == [25.0, -25.0]
    assert [block["images"] for block in numbers["blocks"]] == [4, 4]
    assert numbers["overall"]["latency_ms"]["p50"] == pytest.approx(20)
    assert numbers["lost"] == {"500: no": 1}
    assert (numbers["busy"], numbers["versions"]) == (2, [0, 5])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to a process group")
def test_a_server_that_goes_away_is_remarked_on_once_for_each_time():
    said, times = [], [100.0]
    silence = Silence(said.append, 5.0, lambda: times[-1])

    def look_at(time):
        times.append(time)
        silence.look()
        return len(said)

    assert look_at(110.0) == 0, "nothing is expected before the beginning"
    silence.broken()
    assert [look_at(time) for time in (111.0, 114.9, 115.1, 120.0, 140.0)] == [0, 0, 1, 1, 1]
    assert said == ["note: no answer for 5 s; is the server still there? Requests are sent again, each for 60 s"]
    silence.broken()
    assert [look_at(time) for time in (144.0, 145.1)] == [1, 2]


def test_signals_to_the_whole_group_end_the_simulation_soon(tmp_path):
    """`timeout`, systemd and docker signal all processes; a process may also be killed while its cameras wait."""
    np.save(tmp_path / "labels.npy", np.zeros(4, np.int64))
    (tmp_path / "domains.json").write_text("[]")
    plan = Plan("http://127.0.0.1:9", "m", None, tmp_path, duration=1e6, period=60, images_per_request=1)
    stop = threading.Event()

    def signal_them() -> None:
        workers = multiprocessing.active_children()
        for worker in workers:
            os.kill(worker.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert all(worker.is_alive() for worker in workers)  # the parent decides
        os.kill(workers[0].pid, signal.SIGKILL)
        stop.set()

    def begun() -> None:
        threading.Timer(0.5, signal_them).start()

    def play_on() -> None:
        with suppress(RuntimeError):  # the killed process may be noticed before the stop
            list(play(plan, make_cameras(2, rate=1e-5), 2, stop.is_set, begun))

    playing = threading.Thread(target=play_on, daemon=True)
    playing.start()
    playing.join(timeout=2 * PATIENCE)
    assert not playing.is_alive() and not multiprocessing.active_children()


# The command, against real servers


def test_against_a_server_that_does_not_adapt_both_models_are_equal(tmp_path):
    files = make_files(tmp_path)
    with Server("--model", files.model, "--stats", files.stats, "--no-adapt") as server:
        server.until_ready()
        found = run(
            *("--url", server.url, "--model", files.model, "--data", "digits:test", "--cameras", 5, "--processes", 2),
            *("--images", 300, "--images-per-request", 5, "--fast", "--blocks", 3, "--seed", 1, "--pool", 64),
            *("--output", tmp_path / "sim.json", "--figure", tmp_path / "sim.png"),
        )
        with server.client() as client:
            status = client.get("/api/status").json()
    assert found.returncode == 0, found.stderr
    numbers = json.loads((tmp_path / "sim.json").read_text())
    assert numbers["overall"]["images"] == status["images"] > 200
    assert {c["camera"]: c["images"] for c in status["cameras"]} == {
        c["camera"]: c["images"] for c in numbers["cameras"]
    }
    assert all(camera["gain"] == 0 for camera in numbers["cameras"])  # the same weights, the same images
    assert CLEAN[0] not in found.stderr
    assert "always clear" in found.stdout
    assert "requests lost: 0" in found.stdout
    assert (tmp_path / "sim.png").read_bytes().startswith(b"\x89PNG")


def test_a_demonstration_in_two_commands(tmp_path):
    """Started together, without a word about models: both build the embedded one, and one waits for the other."""
    cache = {"CAFE_TTA_CACHE": str(tmp_path)}
    with Server(env=cache) as server:
        found = run(
            "--url", server.url, "--images", 1200, "--fast", "--pool", 256, "--output", tmp_path / "sim.json", env=cache
        )
    assert found.returncode == 0, found.stderr
    numbers = json.loads((tmp_path / "sim.json").read_text())
    accuracies = {camera["camera"]: camera["served_accuracy"] for camera in numbers["cameras"]}
    assert accuracies["clear-1"] > 95
    assert numbers["lost"] == {}


def test_lost_requests_end_with_code_1_and_soon(tmp_path):
    files = make_files(tmp_path)
    with scripted("fail") as (url, script):
        model = ("--model", files.model, "--data", "digits:test", "--pool", 16)
        found = run("--url", url, *model, "--images", 100_000, "--fast", "--processes", 1)
    assert found.returncode == 1
    assert "500: the model failed" in found.stderr
    assert script.asked < 50_000 / 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--url", "http://127.0.0.1:9", "--wait", "0"), "no server answers at http://127.0.0.1:9"),
        (("--duration", "5", "--images", "5"), "expected `duration` or `images`, but got both"),
        (("--duration", "-1"), "expected `duration` to be above 0 or None, but got -1.0 (--duration)"),
        (("--output", "/no/such/folder/sim.json"), "does not exist"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments, expected, capsys):
    with pytest.raises(SystemExit) as end:
        app(["simulate", *arguments])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
