"""What operators have: logs with request ids, metrics, alert rules, a dashboard for Grafana, warnings."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from cafe_tta.serve.http.metrics import SETTLED, SILENCE, NamedCameras

from .http_server import Server, digits, infer, shared_files, until

DOCS = Path(__file__).parents[2] / "docs" / "serving"
SMALL = (
    "--method", "cafe", "--no-gate", "--step-images", "16", "--validation-images", "16", "--buffer-images", "256",
    "--adapt-share", "1",
    "--set", "normalisation=source",  # this model, which nobody trained, gains nothing from the statistics of batches
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return shared_files(tmp_path_factory)


def noisy(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (digits(count) * 0.5 + random.integers(0, 128, (count, 32, 32, 3))).astype(np.uint8)


def status(client) -> dict:
    return client.get("/api/status").json()


def kinds(client) -> set[str]:
    return {event["kind"] for event in status(client)["events"]}


@pytest.fixture(scope="module")
def logged(files, tmp_path_factory):
    """The log of a server that did all there is to log: two lives with one state. And its metrics."""
    state = tmp_path_factory.mktemp("state")
    options = ("--model", files.model, "--stats", files.stats, "--state", state, "--log-format", "json", *SMALL)
    with Server(*options) as server, server.until_ready().client() as client:
        black = np.zeros((32, 32, 32, 3), np.uint8)
        infer(client, black, "-", camera="black")
        for number in range(60):
            headers = {"X-Request-ID": f"load-{number}"}
            client.headers.update(headers)
            assert infer(client, noisy(32, number), "-", camera="gate").status_code == 200
            if status(client)["version"] >= 1 and "quarantined" in kinds(client):
                break
        until(lambda: {"accepted", "quarantined"} <= kinds(client), "a step and a quarantine")
        client.headers.update({"X-Request-ID": "by-hand"})
        assert client.post("/api/save").json()["ok"]
        assert client.post("/api/rollback", json={"version": 0}).json()["ok"]
        until(lambda: status(client)["drift"]["overall"] is not None, "the drift")
        metrics = client.get("/metrics").text
        assert server.stop() == 0
        lines = server.lines
    with Server(*options) as server, server.until_ready().client() as client:
        infer(client, noisy(32, 0), "-", camera="gate")
        assert server.stop() == 0
    return [json.loads(line) for line in (*lines, *server.lines)], metrics


def test_every_line_is_json_with_time_level_request_and_message(logged):
    lines, _ = logged
    assert all({"time", "level", "logger", "request", "message"} <= line.keys() for line in lines)


def test_what_happens_to_the_model_is_logged_with_the_requests_behind_it(logged):
    events = {line["event"]: line for line in logged[0] if "event" in line}
    assert {"started", "accepted", "quarantined", "saved", "rolled_back"} <= events.keys()
    accepted = events["accepted"]
    assert accepted["cameras"].keys() == {"gate"} and sum(accepted["cameras"].values()) == 16
    assert all(re.fullmatch(r"load-\d+", request) for request in accepted["requests"]) and accepted["requests"]
    assert (events["rolled_back"]["request"], events["rolled_back"]["level"]) == ("by-hand", "warning")
    assert next(line["request"] for line in logged[0] if line.get("event") == "saved") == "by-hand"
    assert "camera black: it sends flat frames" in events["quarantined"]["message"]


def test_log_of_a_restart_says_which_state_is_taken_up(files, tmp_path):
    options = ("--model", files.model, "--stats", files.stats, "--state", tmp_path, *SMALL)
    with Server(*options) as server, server.until_ready().client() as client:
        for number in range(60):
            infer(client, noisy(32, number), "-", camera="gate")
            if status(client)["version"] >= 1:
                break
        assert client.post("/api/pause").json()["ok"]  # waits for no step, and none follows
        assert server.stop() == 0
    with Server(*options) as server, server.until_ready().client() as client:
        client.headers.update({"X-Request-ID": "first-after-start"})
        infer(client, noisy(32, 0), "-", camera="gate")
        assert server.stop() == 0
    assert re.search(
        r"info cafe_tta.serve.events request=- restoring: the source model answers the first 16", server.log
    )
    judged = r"request=\S+ restored: (version \d+ of snapshot-\d{8}.safetensors answers|no saved state was taken up)"
    assert re.search(judged, server.log), server.log


def names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:cafe_tta|process)_\w+", text))


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_every_metric_of_the_examples_is_one_that_the_server_has(logged, file):
    text = (DOCS / file).read_text()
    if file == "alerts.yml":
        rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
        assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in rules)
        expressions = [rule["expr"] for rule in rules]
    else:
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    used = names(" ".join(expressions))
    assert len(used) >= 6 and used <= names(logged[1]), used - names(logged[1])
    labels = set(re.findall(r"\b(\w+)=~?\"", " ".join(expressions))) - {"job"}
    assert all(re.search(rf"\b{label}=\"", logged[1]) for label in labels)


def test_metrics_have_the_drift_of_cameras_by_name(logged):
    found = re.search(r'^cafe_tta_camera_drift\{camera="gate",model="small"\} (\S+)$', logged[1], re.M)
    assert found is not None and float(found[1]) > 0
    assert 'cafe_tta_camera_quarantined{camera="gate",model="small"} 0.0' in logged[1]
    assert 'cafe_tta_quarantined_cameras{model="small"} 1.0' in logged[1]


def camera(name: str, images: int = SETTLED, last_seen: float = 0.0) -> dict:
    return {"camera": name, "images": images, "last_seen": last_seen}


def test_cameras_that_metrics_name_are_few_and_change_slowly():
    named = NamedCameras(2)
    honest = [camera("a", 900), camera("b", 500), camera("new", SETTLED - 1)]
    assert [c["camera"] for c in named.choose(honest, 1.0)] == ["a", "b"]
    flood = [camera(f"fake-{i}", 10**6) for i in range(500)]
    assert [c["camera"] for c in named.choose(honest + flood, 2.0)] == ["a", "b"]  # they keep their places
    after = [camera(f"fake-{i}", 10**6, SILENCE) for i in range(500)]
    chosen = [c["camera"] for c in named.choose(honest + after, SILENCE + 1)]
    assert len(chosen) == 2 and not {"a", "b"} & set(chosen)
    assert not NamedCameras(0).choose(honest, 1.0)


@pytest.mark.parametrize(
    ("host", "token", "warned"), [("0.0.0.0", "", True), ("0.0.0.0", "a-long-token", False), ("127.0.0.1", "", False)]
)
def test_open_address_without_a_token_is_warned_of(files, host, token, warned):
    env = {"CAFE_TTA_SERVE_TOKEN": token}
    with Server("--model", files.model, "--stats", files.stats, "--host", host, env=env) as server:
        assert server.stop() == 0
    text = "warning: everyone who reaches this address can pause and reset the model; set a token to prevent it"
    assert (text in server.log) == warned
