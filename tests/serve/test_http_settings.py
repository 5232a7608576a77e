"""Settings from a file, the environment and flags; and what the command says before it listens."""

import asyncio
import copy
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from cafe_tta import models
from cafe_tta.cli.flags import flags, with_flags
from cafe_tta.options import describe, option
from cafe_tta.serve import Settings, build, load_settings
from cafe_tta.serve.http.app import App, create_app

from .http_server import PREPROCESSING, Files, Server, digits, shared_files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return shared_files(tmp_path_factory)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("CAFE_TTA_SERVE_")]:
        monkeypatch.delenv(name)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path, monkeypatch):
    config = tmp_path / "serve.toml"
    config.write_text('port = 1\nmax_batch_size = 2\nhost = "::1"\nadapt = false\nset = ["lr=0.5", "steps=2"]\n')
    monkeypatch.setenv("CAFE_TTA_SERVE_PORT", "3")
    monkeypatch.setenv("CAFE_TTA_SERVE_MAX_BATCH_SIZE", "4")
    found = load_settings({"port": "5", "stats": None}, config)
    assert (found.port, found.max_batch_size, found.host, found.adapt) == (5, 4, "::1", False)
    assert found.set == ["lr=0.5", "steps=2"]
    monkeypatch.setenv("CAFE_TTA_SERVE_SET", "lr=1, answer=after")
    assert load_settings({}, config).set == ["lr=1", "answer=after"]
    assert load_settings({}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "variables", "text", "error"),
    [
        ({"port": "70000"}, {}, "", "expected `port` to be between 0 and 65535, but got 70000 (--port)"),
        (
            {},
            {"PORT": "http"},
            "",
            "expected `port` to be a whole number between 0 and 65535, but got 'http' (CAFE_TTA_SERVE_PORT)",
        ),
        ({}, {"PROT": "1"}, "", "CAFE_TTA_SERVE_PROT in the environment; did you mean 'CAFE_TTA_SERVE_PORT'?"),
        ({}, {}, "max_batchsize = 3", "'max_batchsize' in FILE; did you mean 'max_batch_size'?"),
        ({}, {}, "max_batch_size = 0", "expected `max_batch_size` to be between 1 and 65536, but got 0 (FILE)"),
        ({}, {}, "[server]\nport = 1", "no setting 'server' in FILE"),
        ({}, {}, "port = ", "FILE is not a TOML file"),
        ({"timeout_action": "wait"}, {}, "", "one of 'reject', 'delay', but got 'wait' (--timeout-action)"),
        ({"max_queue_size": "7"}, {}, "", "expected `max_queue_size` to be at least `max_batch_size` = 128, but got 7"),
        ({"token": "s3cr3t!"}, {}, "", "expected `token` to be a token of at least 8 printable characters"),
        ({}, {"TOKEN": "none"}, "", "without spaces or None (CAFE_TTA_SERVE_TOKEN)"),
        ({}, {}, "port = 1.5", "expected `port` to be a whole number, but got 1.5 (FILE)"),
        ({"seed": "-1"}, {"PORT": "x"}, "", "but got 'x' (CAFE_TTA_SERVE_PORT); expected `seed` to be at least 0"),
        ({}, {}, "adapt = 'perhaps'", "expected `adapt` to be true or false, but got 'perhaps' (FILE)"),
    ],
)
def test_a_wrong_setting_is_named_with_its_place(tmp_path, monkeypatch, flags, variables, text, error):
    config = tmp_path / "serve.toml"
    config.write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(f"CAFE_TTA_SERVE_{name}", value)
    with pytest.raises(ValueError) as caught:
        load_settings(flags, config)
    assert error.replace("FILE", str(config)) in str(caught.value)
    assert "s3cr3t!" not in str(caught.value)


def test_a_setting_is_declared_once_and_has_flag_key_variable_check_and_documentation(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class More(Settings):
        cups: int = option(3, "Number of cups on the table.", panel="The table", least=1)

    seen = []

    @with_flags(More)
    def command(**flags):
        """Sets the table."""
        seen.append(load_settings(flags, config, More).cups)

    config = tmp_path / "serve.toml"
    config.write_text("cups = 4")
    app = typer.Typer()
    app.command()(command)
    run = CliRunner().invoke
    assert run(app, []).exit_code == 0
    monkeypatch.setenv("CAFE_TTA_SERVE_CUPS", "5")
    assert run(app, []).exit_code == 0
    assert run(app, ["--cups", "6"]).exit_code == 0
    assert seen == [4, 5, 6]
    assert str(run(app, ["--cups", "0"]).exception) == "expected `cups` to be at least 1, but got 0 (--cups)"
    assert "Number of cups on the table. Default: 3." in " ".join(run(app, ["--help"]).stdout.split())
    assert "cups: Number of cups on the table. [a whole number at least 1; default: 3]" in More.__doc__


def test_every_setting_has_a_flag_with_a_whole_sentence():
    shown = CliRunner().invoke(serve_app(), ["--help"], env={"COLUMNS": "400"}).stdout
    assert [described.name for described in describe(Settings)] == [field.name for field in fields(Settings)]
    assert {flag.name for flag in flags(Settings)} == {n for described in describe(Settings) for n in described.names}
    for described in describe(Settings):
        assert f"--{described.name.replace('_', '-')} " in shown, described.name
        assert described.meaning[0].isupper() and described.meaning.endswith("."), described.name
    assert "--guard" not in shown  # the old name works, and is not advertised


def serve_app():
    from cafe_tta.cli.serve import serve

    app = typer.Typer()
    app.command()(serve)
    return app


def test_old_names_of_settings_still_work(tmp_path, monkeypatch):
    config = tmp_path / "serve.toml"
    config.write_text("guard = false\nheld_images = 17")
    found = load_settings({}, config)
    assert (found.judge, found.validation_images) == (False, 17)
    monkeypatch.setenv("CAFE_TTA_SERVE_HELD_IMAGES", "18")
    assert load_settings({"guard": True}, config) == Settings(judge=True, validation_images=18)
    config.write_text('stats = "a"\nposterior = "b"')
    assert load_settings({}, config).source == ["a", "b"]
    assert load_settings({"source": ["c"], "histograms": ["d"]}, config).source == ["c", "d"]


def test_the_token_is_in_no_text():
    settings = load_settings({"token": "open-sesame"})
    assert settings.token == "open-sesame"
    assert "open-sesame" not in repr(settings) + str(settings) + f"{settings}"


def test_a_file_may_hold_lists_paths_and_numbers(tmp_path):
    config = tmp_path / "serve.toml"
    config.write_text('mean = [0.1, 0.2, 0.3]\nstd = "1,1,1"\nstate = "kept"\nsave_every = 5\nport = "9"\n')
    found = load_settings({}, config)
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    assert (found.state, found.save_every, found.port) == (Path("kept"), 5, 9)


def test_the_service_needs_no_web_framework():
    program = "import sys, cafe_tta.serve; print([m for m in ('fastapi', 'uvicorn', 'starlette') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert found.stdout == "[]\n", found.stderr


def test_no_module_is_imported_that_only_unix_has():
    modules = "cafe_tta.cli, cafe_tta.serve.http.server, cafe_tta.bench.embedded"
    program = f"import sys; sys.modules['fcntl'] = sys.modules['resource'] = None; import {modules}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr


def command(capsys, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    """Its exit code, what it printed, and its complaints."""
    from cafe_tta.cli import main

    monkeypatch.setattr(sys, "argv", ["cafe-tta", "serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def test_check_tells_what_would_be_served_and_does_not_listen(files, capsys, monkeypatch):
    model = ("--model", files.model, "--source", files.stats)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        done = command(capsys, monkeypatch, "--check", *model, "--port", port, "--set", "lr=0.01", "--name", "gate")
        refused = command(capsys, monkeypatch, *model, "--port", port)
    assert done[0] == 0, done
    assert done[2].startswith(f"loading {files.model}, to be adapted with cafe-plus\n")
    assert re.search(r"^method +cafe-plus, lr=0.01$", done[1], re.MULTILINE)
    for text in ("cafe:digits-resnet", "lr=0.01", f"http://127.0.0.1:{port}/v2/models/gate", "all is well"):
        assert text in done[1]
    told = f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another `port`\n"
    assert refused == (2, "", told)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("--model", "MODEL"),
            "error: cafe-plus needs stats from the source domain, but `source` is empty; ",
        ),
        (("--model", "MODEL", "--stats", "MODEL"), "error: "),
        (("--model", "MODEL", "--method", "cafee"), "error: unknown method 'cafee'; did you mean 'cafe'?"),
        (("--model", "MODEL", "--stats", "STATS", "--set", "lrr=1"), "error: cafe-plus has no option 'lrr'"),
        (("--model", "MODEL", "--stats", "STATS", "--step-images", "1"), "error: expected `step_images`"),
        (("--stats", "STATS"), "error: expected `model` with `source`"),
        (
            ("--model", "MODEL", "--source", "STATS", "--stats", "STATS"),
            "error: expected one file for each kind of source",
        ),
        (("--weights", "MODEL"), "error: expected `model` with `weights`"),
        (("--config", "missing.toml"), "error: missing.toml: No such file or directory"),
    ],
)
def test_what_cannot_be_served_is_one_line(files, monkeypatch, capsys, arguments, error):
    paths = {"MODEL": files.model, "STATS": files.stats}
    given = [paths.get(argument, argument) for argument in arguments]
    code, out, err = command(capsys, monkeypatch, "--check", *given)
    *loading, told = err.splitlines()
    assert (code, out) == (2, "") and all(line.startswith("loading ") for line in loading)
    assert told.startswith(error), err


def test_states_of_the_former_default_go_on_with_their_method_and_say_so_without_it(
    files, tmp_path, capsys, monkeypatch
):
    given = {"model": str(files.model), "source": [str(files.stats)], "state": tmp_path / "state"}
    assert load_settings(given).method == "cafe-plus"
    service = build(load_settings(given | {"method": "cafe"})).service
    service.start()
    service.close()
    common = ("--check", "--model", files.model, "--source", files.stats, "--state", tmp_path / "state")
    code, _, err = command(capsys, monkeypatch, *common)
    assert code == 2 and "is a state of 'cafe', but this is 'cafe-plus'; start with `method` 'cafe' to go on" in err
    (tmp_path / "serve.toml").write_text('method = "cafe"\n')
    for chosen in (("--method", "cafe"), ("--config", tmp_path / "serve.toml")):
        code, out, _ = command(capsys, monkeypatch, *common, *chosen)
        assert code == 0 and "continues with version 0" in out


def test_a_model_that_cannot_answer_is_found_out_and_is_never_ready(files, tmp_path, capsys, monkeypatch):
    broken = copy.deepcopy(files.classifier)
    broken.head.weight.data.fill_(3e38)  # finite, but its answers are not
    path = tmp_path / "small.safetensors"
    models.save(path, broken, "cafe:digits-resnet", PREPROCESSING)
    code, _, err = command(capsys, monkeypatch, "--check", "--model", path, "--method", "source")
    assert (code, "\nerror: the model's answer to a grey image is not finite" in err) == (2, True)

    async def ask() -> list[httpx.Response]:
        settings = load_settings({"model": str(path), "method": "source"})
        built = build(settings)
        state = App([built])
        app = create_app(state)
        transport = httpx.ASGITransport(app)
        async with state.lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [
                await client.get("/v2/health/live"),
                await client.get("/v2/health/ready"),
                await client.get("/v2/models/small/ready"),
                await client.post("/v2/models/small/infer", content=b"{}"),
            ]

    live, *others = asyncio.run(ask())
    assert live.status_code == 200
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in others] == [(503, "1")] * 3
    assert "did not answer an image" in others[0].json()["error"]


def test_without_options_the_embedded_digits_are_served(files, tmp_path):
    cache = tmp_path / "digits"
    cache.mkdir()
    shutil.copy(files.model, cache / "model.safetensors")  # as if it had been trained before
    (cache / "posterior.safetensors").touch()
    with Server(env={"CAFE_TTA_CACHE": str(tmp_path), "CAFE_TTA_SERVE_ACCESS_LOG": "yes"}) as server:
        server.until_ready()
        with server.client() as client:
            pixels = digits(1)
            given = {"name": "images", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": pixels.ravel().tolist()}
            answer = client.post(
                "/v2/models/digits/infer", json={"inputs": [given]}, headers={"X-Request-ID": "seen-in-the-log"}
            )
        assert answer.status_code == 200
        assert answer.json()["outputs"][1]["data"] == [int(files.logits(pixels).argmax())]
        assert server.stop() == 0
    assert "request=seen-in-the-log POST '/v2/models/digits/infer' 200" in server.log
