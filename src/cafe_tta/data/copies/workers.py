"""The work of a job, by this process or by several. The copies do not depend on their number."""

import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from cafe_tta.data.copies import Done, Job, Settings, layout
from cafe_tta.data.imageset import Labels

WAITING = 3  # tasks for each worker: one at work, others at hand

_job: Job | None = None  # of a worker process


def run(job: Job, workers: int) -> Generator[Done, None, None]:
    """Makes what is not there yet; gives a `Done` for every task. May be closed at any time, and begun again."""
    form = layout(job.settings.layout)
    if workers <= 1:
        for task in form.tasks(job):
            yield form.do(job, task)
            form.finish(job, task)
        return
    # Forking a process that has threads, as PyTorch's, is not safe: workers are started from nothing. They open the
    # images themselves: a memory-mapped array would be sent to them whole.
    facts = (job.settings, job.chosen, job.output)
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, facts) as pool:
        tasks = form.tasks(job)
        waiting = {pool.submit(_do, task): task for task in islice(tasks, WAITING * workers)}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    form.finish(job, waiting.pop(future))
                    waiting |= {pool.submit(_do, task): task for task in islice(tasks, 1)}
                    yield result
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process ended by itself, perhaps for lack of memory; what is finished stays, and the same "
                "command goes on: try fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start(settings: Settings, chosen: Labels, output: Path) -> None:
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()

    import cv2

    from cafe_tta import data

    cv2.setNumThreads(1)  # the workers are the threads
    _job = Job(data.load(settings.data), chosen, output, settings)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()  # killed: nobody would ever end this process
        os._exit(1)


def _do(task: Any) -> Done:
    if _job is None:
        raise RuntimeError("this process was not started as a worker")
    return layout(_job.settings.layout).do(_job, task)
