"""Many processes adapt as one: real processes, started by torchrun, that talk over the loopback interface."""

import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from torch import distributed

import cafe_tta as cafe

FOLDER = Path(__file__).parent
SOURCES = Path(cafe.__file__).parents[1]
LIMIT = 600  # seconds for a whole run, on a machine that may be busy
MARK = "CAFE_TTA_TEST_RUN"

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


class Run:
    """A command that was started; knows all processes that came of it by a mark in their environment."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES), "GLOO_SOCKET_IFNAME": "lo", MARK: self.mark}
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        """Exit code and output. Nothing is left behind, or the test fails."""
        try:
            output, _ = self._process.communicate(timeout=LIMIT)
        finally:
            left = self._alive()
            for process in left:
                os.kill(process, 9)
        assert not left, f"processes were left behind: {left}\n{output}"
        return self._process.returncode, output

    def _alive(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
            except OSError:
                continue
            if marked:
                found.append(int(folder.name))
        return found


def torchrun(*arguments: str, **environment: str) -> Run:
    return Run("-m", "torch.distributed.run", *arguments, **environment)


def worker(ranks: int, job: str, path: Path, **environment: str) -> tuple[int, str]:
    run = torchrun(
        "--standalone", f"--nproc-per-node={ranks}", str(FOLDER / "worker.py"), job, str(path), **environment
    )
    return run.finish()


def test_many_ranks_act_as_one_and_resume_on_any_number(tmp_path):
    """Two ranks do all that can be checked and save; three go on from there, and so does one process alone."""
    state = tmp_path / "state.safetensors"
    code, output = worker(2, "all_of_two", state)
    assert code == 0, output
    assert all(f"done: all_of_two on rank {rank}" in output for rank in range(2))
    saved = state.read_bytes()

    code, output = worker(3, "all_of_three", state)
    assert code == 0, output
    assert state.read_bytes() != saved

    sys.path.insert(0, str(FOLDER))
    try:
        import worker as jobs
    finally:
        sys.path.remove(str(FOLDER))
    never_apart = jobs.create("cafe", optimizer="adam")
    for number in range(6):
        never_apart(jobs.images_of_batch(number, 48))
    resumed = jobs.create("cafe", optimizer="adam")
    resumed.load(state)
    jobs.expect_same_state(resumed, never_apart, "two ranks, then three, against one process")


def test_two_hosts(tmp_path):
    """Two agents, one for each host, that find each other by an address."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    meeting += ["--rdzv-id=cafe", "--local-addr=localhost"]
    hosts = [torchrun(*meeting, str(FOLDER / "worker.py"), "two_hosts") for _ in range(2)]
    results = [host.finish() for host in hosts]
    assert [code for code, _ in results] == [0, 0], results
    assert {f"done: two_hosts on rank {rank}" in "".join(text for _, text in results) for rank in range(2)} == {True}


def test_a_rank_that_dies_ends_the_job_and_the_last_state_is_whole(tmp_path):
    state = tmp_path / "state.safetensors"
    started = time.monotonic()
    code, output = worker(2, "die", state, RANKS_TIMEOUT="300")
    assert code != 0
    assert time.monotonic() - started < 300, "the job ended by its timeout only"
    assert "exitcode  : -9" in output  # torchrun says which rank it was
    sys.path.insert(0, str(FOLDER))
    try:
        import worker as jobs
    finally:
        sys.path.remove(str(FOLDER))
    resumed = jobs.create("cafe")
    resumed.load(state)
    assert resumed.counters.batches == 3


def test_a_rank_that_hangs_ends_the_job_within_the_timeout(tmp_path):
    code, output = worker(2, "hang", tmp_path / "none", RANKS_TIMEOUT="10")
    assert code != 0
    assert "RankError: rank 1 died or did not answer in time" in output
    assert "start again from the last saved state, on as many ranks as you like" in output


def test_no_abort_at_exit_in_ten_runs():
    code, output = Run(str(FOLDER / "ten_runs.py")).finish()
    assert code == 0, output
    assert "10 runs, no abort" in output


def test_one_process_imports_and_pays_nothing(source):
    code = (
        "import sys, torch, cafe_tta as cafe\n"
        "net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), "
        "torch.nn.Linear(64, 3))\n"
        "adapter = cafe.create('tent', cafe.split_classifier(net)); adapter(torch.randn(4, 3, 6, 6))\n"
        "print(sorted(name for name in sys.modules if name.startswith('cafe_tta.distributed')))\n"
        "print(len(net[1]._forward_hooks) + sum(len(m._forward_pre_hooks) for m in adapter.modules()))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    modules = [f"cafe_tta.distributed{name}" for name in ("", ".ranks", ".job")]  # nothing that synchronises
    assert run.stdout.splitlines() == [str(sorted(modules)), "0"]


def test_without_torchrun_there_is_one_rank(monkeypatch, source):
    monkeypatch.delenv("RANK", raising=False)
    with cafe.distributed.joined() as rank:
        assert rank == 0
        adapter = cafe.Infomax(source.classifier)
        adapter(source.corrupted)
    assert "bytes" not in adapter.report.notes
    message = "expected `timeout` to be above 0 seconds, but got 0"
    with pytest.raises(ValueError, match=message), cafe.distributed.joined(0):
        pass


def test_the_former_names_still_work_and_say_what_to_write(source):
    with pytest.warns(DeprecationWarning, match="write `cafe_tta.distributed.joined` instead of `cafe_tta.ranks.joi"):
        assert cafe.ranks.joined is cafe.distributed.joined
    with pytest.raises(AttributeError, match="`cafe_tta.ranks` has no attribute `leave`; see `cafe_tta.distributed`"):
        cafe.ranks.leave  # noqa: B018
    with pytest.warns(DeprecationWarning, match="Outside: write `distributed` instead of `adds_up`"):

        class Outside(cafe.Infomax):
            adds_up = False

    assert not Outside.distributed and cafe.Infomax.distributed


def test_a_process_group_of_one_is_one_process(source, tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        alone = cafe.Infomax(source.classifier)
        assert alone.ranks is cafe.distributed.ALONE
    finally:
        distributed.destroy_process_group()
    torch.testing.assert_close(
        alone(source.corrupted), cafe.Infomax(source.classifier)(source.corrupted), rtol=0, atol=0
    )
