"""A plan carried out by one process, or by several: ranks share the runs out, or do every run together."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from cafe_tta import data
from cafe_tta.bench.experiments import Plan
from cafe_tta.bench.records import RECORDS, SETTINGS, Record, read
from cafe_tta.bench.runner import Runner, require_domains
from cafe_tta.bench.source_side import Say, SourceSide, SourceSideOptions
from cafe_tta.distributed import Job, Share, torchrun_job, torchrun_share
from cafe_tta.distributed.job import HEARTBEAT_TIMEOUT, POLL_INTERVAL
from cafe_tta.methods import METHODS

VISIBLE = 120.0  # seconds until a file that one machine wrote is seen by another
Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def _unwatched(description: str, images: int) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def run(
    plan: Plan,
    folder: str | os.PathLike[str],
    source: SourceSideOptions | None = None,
    *,
    say: Say = lambda _: None,
    watch: Watch = _unwatched,
    synchronised: bool = False,
    timeout: float = HEARTBEAT_TIMEOUT,
) -> list[Record]:
    """Does the runs of a plan that `folder` has no record of yet, and returns all records of the folder.

    Stopped at any moment and called again, it continues where it stopped; the message of the interrupt says how far it
    came. Under torchrun the ranks share the runs out; with `synchronised` they do every run together, each with its
    part of every batch, as one adapter. `watch` makes a progress bar: given a description and the number of images, it
    is a context whose value is called with the number of images of each batch.
    """
    if synchronised:
        _check_synchronised(plan)
    folder = Path(folder)
    images = data.load(plan.dataset.data)
    require_domains(plan, images)

    def make(share: Share) -> Runner:
        return Runner(plan, SourceSide(plan.dataset, folder / "source", source, say), folder, share, images)

    if torchrun_share() is None:
        _work(make(Share()), say, watch)
    else:
        with torchrun_job(timeout) as job:
            runner = _join(job, make, folder, synchronised)
            try:
                with job.process_group() if synchronised else nullcontext():
                    _work(runner, say, watch, job)
            except (TimeoutError, ConnectionError, RuntimeError) as error:  # the other ranks, or the machine
                raise RuntimeError(f"{error}; {runner.progress()}") from error
    return read(folder / RECORDS)


def _check_synchronised(plan: Plan) -> None:
    if plan.pace is not None:
        raise ValueError("expected no `pace` with `synchronised`: how busy several ranks are is not known")
    methods = sorted({row.method for row in plan.rows})
    if alone := [name for name in methods if not METHODS[name].distributed]:
        raise ValueError(
            f"{', '.join(alone)} cannot adapt as one over several ranks; leave it out of `methods`, "
            "or do without `synchronised`"
        )


def _work(runner: Runner, say: Say, watch: Watch, job: Job | None = None) -> None:
    for note in runner.notes():
        say(note)
    missing = runner.missing()
    try:
        with watch(f"{len(missing)} runs", sum(len(run.episode) for run in missing)) as advance:
            if job is None:
                runner.work(advance=advance)
            else:
                job.on_progress = advance
                _share_out(runner, job)
                job.on_progress = None
    except KeyboardInterrupt as error:
        error.args = (runner.progress(),)
        raise


def _join(job: Job, make: Callable[[Share], Runner], folder: Path, synchronised: bool) -> Runner:
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


def _share_out(runner: Runner, job: Job) -> None:
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
