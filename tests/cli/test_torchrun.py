"""Real torchrun processes: statistics and records are those of one process, and nothing is lost when a rank is."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cafe_tta as cafe
from cafe_tta.bench import source_side
from cafe_tta.bench.experiments import DATASETS
from cafe_tta.bench.records import read
from cafe_tta.bench.source_side import SourceSide
from cafe_tta.cli import app
from cafe_tta.distributed import Job, RankError, RankLost, Share

SOURCE = Path(__file__).parents[2] / "src"
TOKEN = "CAFE_TTA_TEST"  # an environment variable by which the processes of a launch are found
PATIENCE = 300  # seconds: the machine may be busy
SILENCE = 20  # seconds: longer than a rank is silent when all is well
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The embedded model, trained for a moment, with its source side; and records that one process made."""
    root = tmp_path_factory.mktemp("made")
    training = source_side.DIGITS_TRAINING
    source_side.DIGITS_TRAINING = replace(training, epochs=2, swag_epochs=1)
    try:
        source = SourceSide(DATASETS["digits"], root / "source")
        source.grouped(), source.value("histograms")
    finally:
        source_side.DIGITS_TRAINING = training
    return root


def results(made, folder):
    shutil.copytree(made / "source", folder / "source")
    return folder


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


class Launch:
    """A torchrun that was started, and its ranks."""

    def __init__(self, ranks, arguments, folder):
        self.token, self.number = uuid.uuid4().hex, ranks
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", TOKEN: self.token}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments]
        folder.mkdir(exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(list(map(str, command)), env=environment, stdout=out, stderr=err)

    def processes(self):
        """Ids of what is left of the launch, with the rank of each; torchrun itself has none."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = dict(v.split("=", 1) for v in path.read_text(errors="replace").split("\0") if "=" in v)
            except OSError:  # ended, or not ours
                continue
            if variables.get(TOKEN) == self.token:
                found[int(path.parent.name)] = variables.get("RANK")
        return found

    def find_ranks(self):
        """Waits until every rank has a process, and remembers them: looking in /proc takes a while."""
        ranks = range(self.number)
        self.wait(lambda: {str(rank) for rank in ranks} <= set(self.processes().values()))
        self.ranks = {int(rank): pid for pid, rank in self.processes().items() if rank is not None}

    def signal(self, rank, number):
        os.kill(self.ranks[rank], number)

    def wait(self, until):
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.02)

    def finish(self):
        code = self.process.wait(PATIENCE)
        assert not self.processes()
        return code, self.out.read_text(), self.err.read_text()


@contextmanager
def launched(ranks, arguments, folder):
    launch = Launch(ranks, arguments, folder)
    try:
        yield launch
    finally:
        for pid in launch.processes():
            os.kill(pid, signal.SIGKILL)
        launch.process.wait()


def launch(ranks, arguments, folder):
    """Runs to the end, without a word of complaint."""
    with launched(ranks, arguments, folder) as started:
        code, out, err = started.finish()
    assert code == 0, err
    assert not re.search("abort|terminate|Traceback|warn", err, re.I), err
    return out, err


def in_a_row(*commands):
    rows = [[str(argument) for argument in command] for command in commands]
    return [Path(__file__).parent / "commands_in_a_row.py", json.dumps(rows)]


def assert_same_statistics(path, other):
    a, b = cafe.FeatureStats.load(path), cafe.FeatureStats.load(other)
    assert a.count == b.count and a.meta == b.meta and torch.equal(a.sample, b.sample)
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(a.cov, b.cov, rtol=1e-12, atol=1e-14)


def records(folder):
    """By run, but for what no two runs have in common."""
    timed = {
        "seconds",
        "images_per_second",
        "peak_memory_mb",
        "run_memory_mb",
        "finished",
        "machine",
        "command",
        "code",
    }
    found = read(folder / "records.jsonl")
    assert len({record.key for record in found}) == len(found)  # none twice
    return {record.key: {n: v for n, v in record.to_json().items() if n not in timed} for record in found}


def threads(world, work, timeout=30.0, store=None):
    """Ranks as threads over a store in memory: what each of them gives back, or the error it ended with."""
    store = store or torch.distributed.HashStore()

    def rank(number):
        job = Job(Share(number, world), store, timeout)
        try:
            return work(job)
        except RankError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


def test_every_claim_falls_to_one_rank_and_all_images_are_counted():
    shown = []

    def work(job):
        job.on_progress = shown.append if job.rank == 0 else None
        job.begin()
        own = [number for number in range(40) if job.claim(str(number))]
        for _ in own:
            job.advance(3)
        job.publish(f"own {job.rank}", own)
        job.end()
        return [job.wait_for(f"own {rank}") for rank in range(3)]

    found = threads(3, work)
    assert found[0] == found[1] == found[2]
    assert sorted(number for own in found[0] for number in own) == list(range(40))
    assert sum(shown) == 120


def test_a_rank_that_is_silent_is_named_by_the_one_before_it():
    def work(job):
        job.begin()
        if job.rank == 1:
            return "silent"
        job.barrier("never")
        return "met"

    found = threads(3, work, timeout=1.0)
    assert found[1] == "silent" and isinstance(found[0], RankLost)
    message = (
        r"rank 1 \(.+, process \d+\) has sent no heartbeat for 1 s, the `timeout`: it hangs, or its machine is gone"
    )
    assert re.fullmatch(message, str(found[0]))


def test_a_store_that_does_not_answer_is_an_error_of_one_line():
    class Gone(torch.distributed.HashStore):
        def add(self, key, amount):
            raise RuntimeError("Connection reset by peer\nC++ stack trace")

    (found,) = threads(1, lambda job: job.claim("it"), store=Gone())
    assert isinstance(found, RankLost)
    assert re.fullmatch(r"lost the other ranks: no answer at .+ \(Connection reset by peer\)", str(found))


def test_commands_for_one_process_are_refused_under_torchrun(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
            patch.setenv(name, str(value))
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        result = run("methods", code=2)
        assert result.stdout == "" and result.stderr == (
            "rank 1: error: methods runs in one process; torchrun is for: stats, bench\n"
        )
        assert "methods runs in one process" in (tmp_path / "error.json").read_text()
        result = run("stats", "--model", "m", "--data", "d", "--output", "o", "--histograms", "h", code=2)
        assert "other kinds are made by one process" in result.stderr
        patch.setenv("WORLD_SIZE", "1")
        assert run("methods").stderr == ""  # torchrun with one process: as without
    result = run("bench", "mixed", "--synchronised", "--output", tmp_path / "none", code=2)
    assert "expected --synchronised only under torchrun: torchrun --nproc-per-node 2 -m" in result.stderr
    assert not (tmp_path / "none").exists()


@needs_proc
def test_three_ranks_give_what_one_process_gives(made, tmp_path):
    """Statistics of uneven and empty shares, runs shared out, runs done together: all in one launch."""
    stats = ("stats", "--model", made / "source/model.safetensors", "--data", "digits:train")
    uneven = (*stats, "--batch-size", 100, "--full")  # 901 images: 4, 3 and 3 batches
    few = (*stats, "--batch-size", 1, "--limit", 2)  # one rank has none
    half = (*stats, "--batch-size", 100, "--shard", "2/2")
    bench = ("bench", "online", "--limit", 10, "--seeds", 1, "--corruptions", "fog,contrast,jpeg_compression")
    bench = (*bench, "--methods", "source,adabn,cafe,fr")
    # A rank may have nothing to do: 120 images in batches of 59 leave 2 for three.
    methods, batch = "source,cafe,tent", 59
    together = ("bench", "mixed", "--limit", 20, "--seeds", 1, "--methods", methods, "--set", f"batch_size={batch}")
    for name in ("spread", "together", "one", "one-together"):
        results(made, tmp_path / name)
    out, _ = launch(
        3,
        in_a_row(
            (*uneven, "--feature-stats", tmp_path / "uneven", "--output", tmp_path / "uneven.grouped"),
            (*few, "--feature-stats", tmp_path / "few"),
            (*half, "--output", tmp_path / "second"),
            (*bench, "--output", tmp_path / "spread"),
            (*together, "--output", tmp_path / "together", "--synchronised"),
        ),
        tmp_path / "launch",
    )
    assert out.count("uneven.grouped") == 1 and out.count("records:") == 2  # one rank prints

    run(*uneven, "--feature-stats", tmp_path / "one-uneven", "--output", tmp_path / "one.grouped")
    run(*few, "--feature-stats", tmp_path / "one-few")
    assert_same_statistics(tmp_path / "uneven", tmp_path / "one-uneven")
    assert_same_statistics(tmp_path / "few", tmp_path / "one-few")
    ours, theirs = (cafe.SourceStats.load(tmp_path / f"{name}.grouped") for name in ("uneven", "one"))
    assert all(map(torch.equal, ours.groups, theirs.groups)) and ours.meta["count"] == 901
    limits = [stats.meta["alignment"]["largest"] for stats in (ours, theirs)]
    assert limits[0] == pytest.approx(limits[1], rel=1e-6)  # what the gate needs
    run(*half[:-1], "1/2", "--output", tmp_path / "first")
    run("stats", "--merge", tmp_path / "second", tmp_path / "first", "--feature-stats", tmp_path / "halves")
    assert_same_statistics(tmp_path / "halves", tmp_path / "one-uneven")

    run(*bench, "--output", tmp_path / "one")
    assert len(records(tmp_path / "one")) == 4 * 4
    assert records(tmp_path / "spread") == records(tmp_path / "one")
    run(*together, "--output", tmp_path / "one-together")
    assert_close_records(records(tmp_path / "together"), records(tmp_path / "one-together"))
    assert {r.machine.get("processes") for r in read(tmp_path / "together/records.jsonl")} == {3}


def assert_close_records(ours, theirs):
    """As one batch: parts of a batch are summed in another order."""
    assert ours.keys() == theirs.keys()
    for key, record in ours.items():
        other = theirs[key]
        assert record["accuracy"] == pytest.approx(other["accuracy"], abs=0.01)
        assert record["by_domain"] == pytest.approx(other["by_domain"], abs=0.2)
        for name in ("frechet_before", "frechet_after", "alignment_before", "alignment_after"):
            assert record[name] == pytest.approx(other[name], rel=1e-4)
        assert record["calibration_error"] == pytest.approx(other["calibration_error"], abs=0.01)
        for name in ("episode", "steps", "refused", "config", "source", "model"):
            assert record[name] == other[name]
        for name in ("forward_images", "backward_images"):  # a rank without images runs stand-ins
            assert 0 <= record[name] - other[name] <= 12


@needs_proc
def test_a_rank_that_dies_and_one_that_hangs_end_the_job_and_others_go_on(made, tmp_path):
    """Two ranks: one is killed. Again, with more to do: one is stopped. Then a process alone does the rest."""
    folder = results(made, tmp_path / "results")
    bench = ("bench", "mixed", "--limit", 40, "--no-frechet", "--methods", "source,adabn,infomax,cafe", "--seeds")
    command = ["-m", "cafe_tta", *bench]
    lines = folder / "records.jsonl"

    def count():
        return lines.read_text().count("\n") if lines.exists() else 0

    with launched(2, [*command, 12, "--output", folder], tmp_path / "dies") as job:
        job.find_ranks()
        job.wait(lambda: count() >= 2)
        job.signal(0, signal.SIGSTOP)  # or it may do all there is before torchrun notices
        job.signal(1, signal.SIGKILL)
        job.wait(lambda: "closing signal" in job.err.read_text())
        job.signal(0, signal.SIGCONT)
        code, out, err = job.finish()
    done = count()
    assert code == 1 and out == "" and 2 <= done < 48
    assert f"interrupted: {done} of 48 runs are done and kept in {folder}; start again to go on" in err
    assert "Signal 9 (SIGKILL)" in err  # torchrun says which

    with launched(2, [*command, 16, "--output", folder, "--timeout", SILENCE], tmp_path / "hangs") as job:
        job.find_ranks()
        job.wait(lambda: count() > done)
        job.signal(1, signal.SIGSTOP)
        job.wait(lambda: "no heartbeat" in job.err.read_text())
        job.signal(1, signal.SIGCONT)  # or torchrun waits half a minute for it to heed its signal
        code, out, err = job.finish()
    assert code == 1 and out == "" and f"{done} of 64 runs are done already" in err
    done = count()
    lost = rf"rank 0: error: rank 1 \(.+, process \d+\) has sent no heartbeat for {SILENCE} s, .+; (\d+) of 64 runs"
    told = re.search(lost, err)
    # Once it is let go on, it may write a few more before it heeds its signal.
    assert told and int(told[1]) <= done, err
    with lines.open("a") as file:
        file.write('{"format": 1, "cut": "of')

    said = run(*bench, 16, "--output", folder).stderr
    assert f"{done} of 64 runs are done already" in said and "cut off by a crash" in said
    run(*bench, 16, "--output", results(made, tmp_path / "undisturbed"))
    assert records(folder) == records(tmp_path / "undisturbed")
