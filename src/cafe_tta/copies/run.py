"""Carries out a job, in this process or in several. The copies do not depend on their number."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from cafe_tta import corruptions, data, plugins, storage
from cafe_tta.copies.arrays import Arrays
from cafe_tta.copies.files import Files
from cafe_tta.copies.job import CopyOptions, Done, Job, Layout, Settings, plan
from cafe_tta.copies.sheet import contact_sheet as draw
from cafe_tta.data import ImageSet, Labels, Unreadable
from cafe_tta.data.folder import CONTACT_SHEET

TASKS_PER_WORKER = 3  # one in progress, others at hand
_LAYOUTS: dict[str, type[Layout]] = {"folder": Files, "arrays": Arrays, "cifar-c": Arrays}

_job: Job | None = None  # of a worker process


@dataclass(frozen=True)
class Copies:
    """Finished copies."""

    output: Path
    settings: Settings
    left_out: tuple[Unreadable, ...]  # images that could not be copied; also listed in left-out.txt
    contact_sheet: Path | None


def make(
    imageset: ImageSet,
    output: str | os.PathLike[str],
    *,
    name: str | None = None,
    workers: int = 1,
    contact_sheet: bool = True,
    advance: Callable[[int], None] = lambda amount: None,
    **options: Any,
) -> Copies:
    """Writes corrupted copies of the images to a folder. `options` are those of `CopyOptions`.

    Called again with the same arguments after a stop of any kind, it makes what is missing. `advance` is called with
    the number of copies made; an exception in it stops the job. Several `workers` load the image set by its name.
    """
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    job = plan(imageset, output, CopyOptions(**values), name=name)
    if workers > 1 and name is None:
        _require_loadable(job)
    return carry_out(job, workers=workers, contact_sheet=contact_sheet, advance=advance)


def carry_out(
    job: Job,
    *,
    workers: int = 1,
    contact_sheet: bool = True,
    advance: Callable[[int], None] = lambda amount: None,
) -> Copies:
    """Makes the copies of a job that are not there yet, and draws the contact sheet."""
    if workers < 1:
        raise ValueError(f"expected `workers` to be at least 1, but got {workers}")
    left_out = {item.index: item for item in job.left_out}
    layout = _LAYOUTS[job.settings.layout]()
    with closing(_run(job, layout, workers)) as work:
        for done in work:
            left_out |= {item.index: item for item in done.left_out}
            advance(done.copies)
    listed = tuple(left_out[index] for index in sorted(left_out))
    if listed:
        lines = "".join(f"{item.name}\t{item.why}\n" for item in listed)
        storage.write_bytes(job.output / "left-out.txt", lines.encode(errors="surrogateescape"))
    sheet = job.output / CONTACT_SHEET if contact_sheet and len(listed) < len(job.chosen) else None
    if sheet is not None:
        storage.write_bytes(sheet, draw(job, layout))
    shutil.rmtree(job.unfinished, ignore_errors=True)
    return Copies(job.output, job.settings, listed, sheet)


def _run(job: Job, layout: Layout, workers: int) -> Generator[Done, None, None]:
    """Does the tasks, and gives a `Done` for each. May be closed at any time."""
    if workers == 1:
        for task in layout.tasks(job):
            yield layout.do(job, task)
            layout.finish(job, task)
        return
    # Forking a process that has threads, such as PyTorch's, is not safe: workers are spawned. They load the image set
    # themselves: a memory-mapped array would be sent to them whole.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, _arguments(job)) as pool:
        tasks = layout.tasks(job)
        waiting = {pool.submit(_do, task): task for task in islice(tasks, TASKS_PER_WORKER * workers)}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    layout.finish(job, waiting.pop(future))
                    waiting |= {pool.submit(_do, task): task for task in islice(tasks, 1)}
                    yield result
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process ended unexpectedly, perhaps for lack of memory; finished copies are kept: make the "
                "rest with fewer `workers`"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _require_loadable(job: Job) -> None:
    """Refuses image sets that other processes cannot load."""
    name = job.settings.data
    try:
        same = data.load(name).digest() == job.settings.digest
    except (ValueError, OSError):
        same = False
    if not same:
        raise ValueError(
            f"expected an image set that worker processes can load, but {name!r} is not one; give the `name` that "
            "data.load takes, or use 1 of `workers`"
        )


def _arguments(job: Job) -> tuple[Any, ...]:
    return job.settings, job.chosen, job.output, plugins.added("corruptions")


def _start(settings: Settings, chosen: Labels, output: Path, own_corruptions: list[str]) -> None:
    """The start of a worker process."""
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()

    import cv2

    cv2.setNumThreads(1)  # the workers are the threads
    for text in own_corruptions:
        corruptions.corruption_name(text)
    _job = Job(data.load(settings.data), chosen, output, settings)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()  # if it was killed, nothing else would ever end this process
        os._exit(1)


def _do(task: Any) -> Done:
    if _job is None:
        raise RuntimeError("this process was not started as a worker")
    return _LAYOUTS[_job.settings.layout]().do(_job, task)
