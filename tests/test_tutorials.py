"""The tutorials, run as a reader would: shell blocks in one terminal, Python blocks in one session, page by page."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted(page for page in (ROOT / "docs/tutorials").glob("*.md") if page.name != "index.md")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
PORT = "8080"  # of the pages


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(language, title or "", text) for language, title, text in BLOCK.findall(page.read_text())]


class Terminal:
    """A shell that runs one block after the other and stops at the first command that fails."""

    END = "<<< end of block >>>"

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.errors = folder / "stderr.txt"
        with self.errors.open("w") as errors:
            self.shell = subprocess.Popen(
                ["bash", "-e"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env=environment,
                text=True,
                start_new_session=True,
            )

    def run(self, commands: str) -> str:
        """What the commands print. After five minutes they are ended, which fails."""
        assert self.shell.stdin is not None and self.shell.stdout is not None
        self.shell.stdin.write(f"{commands}\necho '{self.END}'\n")
        self.shell.stdin.flush()
        lines = []
        watchdog = threading.Timer(300, self.kill)
        watchdog.start()
        try:
            for line in self.shell.stdout:
                lines.append(line.replace(self.END, ""))
                if self.END in line:
                    return "".join(lines)
        finally:
            watchdog.cancel()
        pytest.fail(f"a command of this block failed:\n{commands}\n{''.join(lines)}\n{self.errors.read_text()}")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the shell and what it has started."""
        self.kill()
        self.shell.wait()
        for stream in (self.shell.stdin, self.shell.stdout):
            assert stream is not None
            stream.close()


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture
def terminal(tmp_path) -> Iterator[Terminal]:
    commands = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    terminal = Terminal(tmp_path, environment)
    yield terminal
    terminal.close()


def assert_alike(shown: str, printed: str) -> None:
    """The last lines that were printed: the same words, and numbers that differ by a fifth at most.

    Another machine trains another model.
    """
    last = "\n".join(printed.strip().splitlines()[-len(shown.splitlines()) :])
    assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", last).split(), f"{shown}\nis shown, but got\n{printed}"
    for number, other in zip(NUMBER.findall(shown), NUMBER.findall(last), strict=True):
        assert float(other) == pytest.approx(float(number), rel=0.2, abs=0.05), f"{shown}\nis shown, but got\n{last}"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_printed(page, tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    port, names, printed = free_port(), {"__name__": "tutorial"}, ""
    for block in blocks_of(page):
        text = block.text.replace(PORT, port)
        if block.title:
            (tmp_path / block.title).write_text(text)
        elif block.language == "python":
            exec(compile(text, str(page), "exec"), names)
            printed = capsys.readouterr().out
        elif block.language == "sh":
            printed = terminal.run(text)
        elif block.language == "text":
            assert_alike(text, printed)
    for module in {Path(block.title).stem for block in blocks_of(page) if block.title}:
        sys.modules.pop(module, None)
