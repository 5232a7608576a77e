"""A benchmark over several processes: the ranks of a job share its runs out, or do every run together."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from cafe_tta.bench.experiments import Plan
from cafe_tta.bench.records import SETTINGS
from cafe_tta.bench.runner import Runner
from cafe_tta.distributed import Job, Share
from cafe_tta.distributed.job import POLL_INTERVAL
from cafe_tta.methods import METHODS

VISIBLE = 120.0  # seconds until a file that one machine wrote is seen by another


def check_synchronised(plan: Plan) -> None:
    """Refuses methods that several processes cannot run as one adapter."""
    methods = sorted({row.method for row in plan.rows})
    if alone := [name for name in methods if not METHODS[name].distributed]:
        raise ValueError(
            f"{', '.join(alone)} cannot adapt as one over several ranks; leave it out of `methods`, "
            "or do without `synchronised`"
        )


def join(job: Job, make: Callable[[Share], Runner], folder: Path, synchronised: bool) -> Runner:
    """The runner of one rank. Rank 0 alone makes what all of them need of the source side."""
    share = Share(job.rank, job.world) if synchronised else Share()
    if job.rank:
        _wait_for_files(job, folder, job.wait_for("source side"))
        return make(share)
    runner = make(share)
    runner.prepare()
    made = [folder / SETTINGS, *sorted((folder / "source").glob("*.safetensors"))]
    if synchronised:
        runner = make(share)  # from the same files as the others: adapters compare what they are made of
    job.publish("source side", {str(path.relative_to(folder)): path.stat().st_size for path in made})
    return runner


def work(runner: Runner, job: Job) -> None:
    """Does this rank's runs, or its part of every run, and waits for the other ranks."""
    runner.results.waiting = job.heartbeat
    if runner.share.ranks > 1:
        runner.work(started=job.heartbeat, advance=job.advance)
    else:
        runner.work(
            started=job.heartbeat,
            advance=job.advance,
            claim=lambda planned: job.claim(json.dumps(planned.key)),
            begin=job.rank / job.world,
        )
    job.barrier("runs")


def _wait_for_files(job: Job, folder: Path, files: dict[str, int]) -> None:
    """Waits until this machine sees what rank 0 has written: network file systems take their time."""
    deadline = time.monotonic() + VISIBLE
    while unseen := [name for name, size in files.items() if _size(folder / name) != size]:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"rank 0 has written {folder / unseen[0]}, but this rank does not see it: "
                "the results must go to a folder that all machines share"
            )
        time.sleep(POLL_INTERVAL)
        job.heartbeat()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
