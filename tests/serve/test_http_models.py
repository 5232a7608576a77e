"""Several models in one server: each answers, adapts, saves and is measured by itself; a reload changes which ones."""

import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from cafe_tta.cli import main
from cafe_tta.options import describe
from cafe_tta.serve import Settings, build, load_models, load_settings
from cafe_tta.serve.settings import of_model
from cafe_tta.simulate import Simulation, SimulationOptions

from .http_server import PATIENCE, Files, Server, digits, infer, logits, make_files, pause, shared_files, until

TOKEN = "sesame-open-wide"
COMMON = """
method = "cafe"
gate = false
judge = false
step_images = 16
validation_images = 16
buffer_images = 256
set = ["normalisation=source"]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Files]:
    """Two models, by the names they are served under."""
    return {"gate": shared_files(tmp_path_factory), "lane": make_files(tmp_path_factory.mktemp("lane"), seed=1)}


def table(name: str, files: Files, *more: str) -> str:
    lines = (f"[models.{name}]", f'model = "{files.model}"', f'source = ["{files.stats}"]', *more)
    return "\n".join(lines) + "\n"


def write(config: Path, *parts: str) -> Path:
    config.write_text("\n".join((COMMON, *parts)))
    return config


def ask(client: httpx.Client, model: str, pixels: np.ndarray, **parameters: object) -> httpx.Response:
    return infer(client, pixels, "x", model=model, **parameters)


def status(client: httpx.Client, model: str) -> dict:
    return client.get("/api/status", params={"model": model}).json()


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    outside = (f'token = "{TOKEN}"', "grpc_port = 0", f'state = "{folder / "states"}"')
    config = write(folder / "serve.toml", *outside, *(table(name, files[name]) for name in files))
    with Server("--config", config) as server:
        yield server.until_ready()


@pytest.fixture(scope="module")
def client(server):
    with server.client(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client


def test_each_model_answers_under_its_own_name(files, server, client):
    for name in files:
        np.testing.assert_allclose(
            logits(ask(client, name, digits(4), adapt=False)), files[name].logits(digits(4)), atol=1e-4
        )
        assert client.get(f"/v2/models/{name}/ready").status_code == 200
        assert client.get(f"/v2/models/{name}").json()["name"] == name
        assert client.get(f"/v2/models/{name}/config").json()["name"] == name
    listed = client.post("/v2/repository/index").json()
    assert [(model["name"], model["state"]) for model in listed] == [("gate", "READY"), ("lane", "READY")]
    answer = ask(client, "other", digits(1))
    assert answer.status_code == 404
    assert answer.json()["error"] == "no model 'other'; this server has 'gate', 'lane'"
    assert client.get("/v2/models/other/ready").status_code == 404


def test_grpc_addresses_models_by_name_too(files, server):
    until(lambda: "over gRPC on" in server.log, "the gRPC port")
    found = re.search(r"serving gate,lane over gRPC on (\S+)", server.log)
    with triton.InferenceServerClient(found[1]) as client:
        assert client.is_server_ready() and client.is_model_ready("gate") and client.is_model_ready("lane")
        assert [model.name for model in client.get_model_repository_index().models] == ["gate", "lane"]
        given = triton.InferInput("images", [4, 32, 32, 3], "UINT8")
        given.set_data_from_numpy(digits(4))
        for name in files:
            answer = client.infer(name, [given], parameters={"adapt": False})
            np.testing.assert_allclose(answer.as_numpy("logits"), files[name].logits(digits(4)), atol=1e-4)
        with pytest.raises(InferenceServerException, match="no model 'other'; this server has 'gate', 'lane'"):
            client.infer("other", [given])


def test_models_adapt_save_and_are_controlled_each_by_itself(files, server, client, tmp_path_factory):
    for part in np.split(noise(64), 4):
        assert ask(client, "lane", part, camera="noise").status_code == 200
    until(lambda: status(client, "lane")["version"] >= 1, "a step")
    assert status(client, "gate")["version"] == 0 and status(client, "gate")["adapted_images"] == 0
    assert "noise" not in [camera["camera"] for camera in status(client, "gate")["cameras"]]
    assert client.post("/api/pause", params={"model": "lane"}).json()["ok"]
    assert (status(client, "gate")["state"], status(client, "lane")["state"]) == ("adapting", "paused")
    assert client.post("/api/save", params={"model": "lane"}).json()["ok"]
    states = {path.parent.name for path in Path(server_state(server)).glob("*/snapshot-*")}
    assert states == {"lane"}
    assert client.post("/api/cameras/noise?model=lane", json={"adapt": False}).json()["ok"]
    opted = {camera["camera"]: camera["opted_out"] for camera in status(client, "lane")["cameras"]}
    assert opted["noise"]
    assert client.post("/api/reset", params={"model": "lane"}).json() == {"ok": True, "version": 0}
    assert client.post("/api/resume", params={"model": "lane"}).json()["ok"]


def server_state(server: Server) -> str:
    config = Path(server.process.args[server.process.args.index("--config") + 1])
    return str(config.parent / "states")


def test_controls_and_status_have_to_say_which_model_they_mean(client):
    for answer in (client.get("/api/status"), client.get("/api/events"), client.post("/api/pause")):
        assert answer.status_code == 409
        assert answer.json()["error"] == "this server has 2 models; say which one, such as ?model=gate"
    assert client.post("/api/pause?model=other").status_code == 404
    assert client.post("/api/pause?model=gate", headers={"Authorization": "Bearer wrong-token"}).status_code == 401


def test_simulated_cameras_say_which_model_they_mean(files, server):
    options = SimulationOptions(url=server.url, model=str(files["lane"].model), data="digits:test", pool=16)
    for name in (None, "street"):
        with pytest.raises(ValueError, match=rf"the models that the server has \(gate, lane\), but got {name}"):
            Simulation(replace(options, name=name))
    assert Simulation(replace(options, name="lane"))._served == "lane"


def test_metrics_and_summary_are_by_model(client):
    ask(client, "gate", digits(3), adapt=False)
    text = client.get("/metrics").text
    for name in ("gate", "lane"):
        assert re.search(rf'^cafe_tta_requests_total{{code="200",model="{name}"}} \d', text, re.M)
        assert f'cafe_tta_model_version{{model="{name}"}}' in text
        assert f'cafe_tta_request_seconds_count{{model="{name}"}}' in text
    assert text.count("# TYPE cafe_tta_model_version gauge") == 1
    gate, lane = client.get("/api/models").json()
    assert (gate["name"], lane["name"]) == ("gate", "lane") and gate["ready"] and lane["ready"]
    assert lane["images"] == status(client, "lane")["images"] > gate["images"] > 0


def test_one_models_flood_leaves_the_other_its_queue_and_its_memory(files, tmp_path):
    # A request of 7 images takes 7 * (3,072 + 12,288) bytes, so that the half of a model has room for four of them.
    limits = (
        *("max_body_bytes = 60000", "max_grpc_bytes = 60000", "max_pending_bytes = 1000000"),
        *("max_batch_size = 24", "max_queue_size = 24"),
    )
    delay = "max_queue_delay_microseconds = 60000000"  # its requests wait, and hold their memory, until it is stopped
    timeout = "default_timeout_microseconds = 120000000"
    gate = table("gate", files["gate"], delay, timeout, "max_queue_size = 1024", "max_batch_size = 32")
    config = write(tmp_path / "serve.toml", "adapt = false", *limits, gate, table("lane", files["lane"]))
    flood: list[int] = []

    def keep_sending(server: Server) -> None:
        with server.client() as client:
            flood.append(ask(client, "gate", digits(7)).status_code)

    with Server("--config", config) as server, server.until_ready().client() as client:
        threads = [threading.Thread(target=keep_sending, args=(server,)) for _ in range(24)]
        for thread in threads:
            thread.start()
        until(lambda: 429 in flood, "the limit of one model")  # its queue has room: its part of the memory is full
        refused = ask(client, "gate", digits(16))
        assert refused.status_code == 429 and "the part of this model among 2" in refused.json()["error"]
        for _ in range(10):
            np.testing.assert_allclose(
                logits(ask(client, "lane", digits(4))), files["lane"].logits(digits(4)), atol=1e-4
            )
        assert server.stop() == 0
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(flood) == [200] * 4 + [429] * 20  # what was let in was answered at the end
    assert "Traceback" not in server.log


class Senders:
    """Clients that never stop asking, one for each model, and what they were answered."""

    def __init__(self, server: Server, *models: str) -> None:
        self.stop = threading.Event()
        self.answers: dict[str, list[np.ndarray]] = {model: [] for model in models}
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._send, args=(server, model)) for model in models]

    def _send(self, server: Server, model: str) -> None:
        with server.client() as client:
            while not self.stop.is_set():
                answer = ask(client, model, digits(4), adapt=False)
                if answer.status_code == 200:
                    self.answers[model].append(logits(answer))
                else:
                    self.wrong.append(answer.text)

    def go_on(self) -> None:
        """Waits for some more answers of every model."""
        known = {model: len(found) for model, found in self.answers.items()}
        until(lambda: all(len(self.answers[model]) > count + 5 for model, count in known.items()), "answers")

    def __enter__(self) -> "Senders":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def test_reload_adds_replaces_and_removes_models_without_losing_a_request(files, tmp_path):
    config = tmp_path / "serve.toml"
    gate, lane = (table(name, files[name], f'state = "{tmp_path / name}"') for name in ("gate", "lane"))
    write(config, gate)
    with Server("--config", config) as server, server.until_ready().client() as client:
        for part in np.split(noise(64), 4):
            ask(client, "gate", part, camera="noise")
        until(lambda: client.get("/api/status").json()["version"] >= 1, "a step")  # there is one model: no name needed
        pause(client)
        adapted = logits(ask(client, "gate", digits(4), adapt=False))
        with Senders(server, "gate") as senders:
            senders.go_on()
            write(config, gate, lane)
            assert client.post("/api/reload").json()["versions"].keys() == {"gate", "lane"}
            senders.go_on()
            # What has not changed goes on as it is: it is neither saved nor started again, and stays paused.
            assert status(client, "gate")["state"] == "paused" and not list((tmp_path / "gate").glob("snapshot-*"))
            np.testing.assert_allclose(
                logits(ask(client, "lane", digits(4), adapt=False)), files["lane"].logits(digits(4)), atol=1e-4
            )
            with Senders(server, "lane") as others:
                others.go_on()
                write(config, gate, table("lane", files["gate"]))  # another model under the name
                server.process.send_signal(signal.SIGHUP)
                until(lambda: server.log.count("serving gate,lane on") == 1, "the reload")
                others.go_on()
            np.testing.assert_allclose(others.answers["lane"][0], files["lane"].logits(digits(4)), atol=1e-4)
            np.testing.assert_allclose(others.answers["lane"][-1], files["gate"].logits(digits(4)), atol=1e-4)
            assert not others.wrong
            write(config, gate)
            server.process.send_signal(signal.SIGHUP)
            until(lambda: server.log.count("serving gate on") == 2, "the removal")
            senders.go_on()
        assert not senders.wrong
        assert all(np.abs(answer - adapted).max() < 1e-4 for answer in senders.answers["gate"])
        assert ask(client, "lane", digits(1)).status_code == 404
        assert 'model="lane"' not in client.get("/metrics").text
        assert client.get("/api/status").json()["name"] == "gate"  # the old addresses work again
        assert server.stop() == 0
    assert list((tmp_path / "gate").glob("snapshot-*")) and "Traceback" not in server.log


def test_model_whose_reload_fails_goes_on_and_the_others_are_replaced(files, tmp_path):
    config = write(tmp_path / "serve.toml", *(table(name, files[name]) for name in files))
    with Server("--config", config) as server, server.until_ready().client() as client:
        broken = table("gate", files["gate"]).replace("small.safetensors", "missing.safetensors")
        write(config, broken, table("lane", files["gate"]))
        answer = client.post("/api/reload")
        assert answer.status_code == 409 and "cannot reload: gate: " in answer.json()["error"], answer.text
        assert "missing.safetensors" in answer.json()["error"] and str(tmp_path) not in answer.text
        for name in files:  # the one goes on, the other was replaced
            found = logits(ask(client, name, digits(4), adapt=False))
            np.testing.assert_allclose(found, files["gate"].logits(digits(4)), atol=1e-4)
        write(config, broken)  # where something is wrong, nothing is removed
        assert client.post("/api/reload").status_code == 409
        assert ask(client, "lane", digits(1), adapt=False).status_code == 200
        assert client.post("/api/reload?model=lane").status_code == 409  # the file has none of that name
        write(config, table("gate", files["lane"]), table("lane", files["gate"]))
        assert client.post("/api/reload?model=gate").json() == {"ok": True, "version": 0}
        found = logits(ask(client, "gate", digits(4), adapt=False))
        np.testing.assert_allclose(found, files["lane"].logits(digits(4)), atol=1e-4)
        # What belongs to the server holds for models that have not changed, too.
        write(config, f'token = "{TOKEN}"', table("gate", files["lane"]), table("lane", files["gate"]))
        started = status(client, "gate")["started"]
        assert client.post("/api/reload").json() == {"ok": True, "versions": {"gate": 0, "lane": 0}}
        assert status(client, "gate")["started"] == started
        assert client.post("/api/pause?model=gate").status_code == 401
        assert server.stop() == 0
    assert "Traceback" not in server.log


def test_model_has_changed_when_its_settings_or_its_files_have(files, tmp_path):
    copy = tmp_path / "small.safetensors"
    shutil.copy(files["gate"].model, copy)
    given = {"model": str(copy), "source": [str(files["gate"].stats)]}
    built = build(load_settings(given))
    assert built.is_current(load_settings(given))
    assert built.is_current(load_settings(given | {"port": "1", "token": TOKEN}))  # of the server, not of the model
    assert not built.is_current(load_settings(given | {"seed": "1"}))
    assert not built.is_current(load_settings(given | {"token": TOKEN, "leader": "http://127.0.0.1:1"}))
    os.utime(copy, ns=(1, 1))
    assert not built.is_current(load_settings(given))


# Settings


def test_the_settings_of_the_docs_are_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "serving" / "models.md").read_text()
    block = page.partition("    port = 8080")
    lines = (block[1] + block[2]).partition("    cafe-tta serve")[0].splitlines()
    config = tmp_path / "serve.toml"
    config.write_text("\n".join(line.strip() for line in lines))
    gate, lane = load_models({}, config)
    assert (gate.name, gate.method, gate.state) == ("gate", "cafe-plus", Path("states/gate"))
    assert (lane.name, lane.method, lane.max_batch_size) == ("lane", "cafe", 32)
    named = page.partition("To the server: ")[2].partition(". Inside")[0]
    process = {described.name for described in describe(Settings) if described.extra.get("process")}
    assert set(re.findall(r"`(\w+)`", named)) == process


def test_settings_outside_of_the_tables_hold_for_all_models(tmp_path, monkeypatch):
    config = tmp_path / "serve.toml"
    config.write_text(
        'port = 1\nmethod = "tent"\nstate = "states"\nseed = 1\n'
        '[models.gate]\nmodel = "a"\nseed = 2\n[models.lane]\nmodel = "b"\nstate = "own"\n'
    )
    gate, lane = load_models({}, config)
    assert (gate.name, gate.model, gate.method, gate.seed, gate.port) == ("gate", "a", "tent", 2, 1)
    assert (lane.name, lane.model, lane.method, lane.seed, lane.port) == ("lane", "b", "tent", 1, 1)
    assert (gate.state, lane.state) == (Path("states/gate"), Path("own"))
    monkeypatch.setenv("CAFE_TTA_SERVE_STATE", "/state")  # as the container has it
    gate, lane = load_models({"seed": "3"}, config)
    assert (gate.state, lane.state, gate.seed, lane.seed) == (Path("/state/gate"), Path("/state/lane"), 3, 3)
    with pytest.raises(ValueError, match="expected the settings of one model, but .* has 2: gate, lane"):
        load_settings({}, config)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[models.gate]\nport = 1\n", "expected `port` outside of [models.gate] of FILE: it belongs to the server"),
        ("[models.gate]\nname = 'x'\n", "expected no `name` in [models.gate] of FILE: the heading"),
        ("name = 'x'\n[models.gate]\n", "expected no `name` beside [models.NAME] in FILE: the table says it (FILE)"),
        ("[[models]]\nname = 'x'\n", "expected tables [models.NAME] in FILE, one for each model, but got [{"),
        ("[models]\n", "expected tables [models.NAME] in FILE, one for each model, but got {}"),
        ("models.gate = 3\n", "expected [models.gate] of FILE to be a table of settings, but got 3"),
        ("[models.gate]\nsede = 1\n", "no setting 'sede' in [models.gate] of FILE; did you mean 'seed'?"),
        ("[models.'a b']\n", "expected `name` to be letters, digits, and . _ -"),
        (
            "[models.a]\nstate = 'x'\n[models.b]\nstate = './x'\n",
            "expected a folder of its own for the `state` of every model, but a and b share ",
        ),
    ],
)
def test_tables_that_cannot_be_served_say_what_is_wrong(tmp_path, text, error):
    config = tmp_path / "serve.toml"
    config.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_models({}, config)
    assert error.replace("FILE", str(config)) in str(caught.value)


def test_every_setting_belongs_to_the_process_or_to_a_model():
    process = {described.name for described in describe(Settings)} - of_model(Settings()).keys()
    assert {"host", "port", "grpc_port", "token", "max_pending_bytes", "log_format"} <= process
    assert not process & {"model", "state", "method", "seed", "camera_tokens", "max_queue_size", "name"}


def command(capsys, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["cafe-tta", "serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return (end.value.code or 0, *capsys.readouterr())


def test_check_looks_at_every_model(files, tmp_path, capsys, monkeypatch):
    config = write(tmp_path / "serve.toml", *(table(name, files[name]) for name in files))
    code, out, err = command(capsys, monkeypatch, "--check", "--config", config)
    assert code == 0, err
    assert out.count("one image was answered; all is well") == 2
    assert "/v2/models/gate" in out and "/v2/models/lane" in out


@pytest.mark.parametrize("check", [("--check",), ()])
def test_one_broken_model_is_a_clear_error_at_the_start(files, tmp_path, capsys, monkeypatch, check):
    lane = table("lane", files["lane"]).replace("small.safetensors", "missing.safetensors")
    config = write(tmp_path / "serve.toml", table("gate", files["gate"]), lane)
    code, _, err = command(capsys, monkeypatch, *check, "--port", "0", "--config", config)
    assert code == 2 and "error: the model 'lane' cannot be served: " in err and "missing.safetensors" in err


def test_models_whose_requests_do_not_fit_into_their_part_of_the_memory_are_refused(
    files, tmp_path, capsys, monkeypatch
):
    config = write(tmp_path / "serve.toml", "max_pending_bytes = 100_000_000", *(table(n, files[n]) for n in files))
    code, _, err = command(capsys, monkeypatch, "--check", "--config", config)
    assert code == 2 and "all requests to it may take 50000000, its part of max_pending_bytes = 100000000" in err
