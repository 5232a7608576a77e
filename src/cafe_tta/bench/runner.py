"""Many runs: every method, episode and seed of an experiment, each written down as it ends, none twice."""

import hashlib
import os
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cafe_tta
from cafe_tta import corruptions, data
from cafe_tta.adapter import Adapter
from cafe_tta.bench.experiments import Choice, Experiment, Part
from cafe_tta.bench.protocols import Episode
from cafe_tta.bench.records import FORMAT, Results
from cafe_tta.bench.run import Outcome, Reference, run
from cafe_tta.bench.source_side import SourceSide
from cafe_tta.bench.stream import Stream
from cafe_tta.distributed import Share
from cafe_tta.gaussians import EIGENVALUE_FLOOR, SourceGaussians
from cafe_tta.methods import METHODS
from cafe_tta.metrics import FrechetReference

BLOCKS, SMALLEST_BLOCK = 20, 50  # points of the curve along a stream, and images that a point takes at least
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "opencv-python-headless", "timm", "torchvision")


@dataclass(frozen=True)
class Planned:
    """A run that the experiment asks for."""

    part: Part
    choice: Choice
    seed: int
    episode: Episode

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.part.protocol, self.part.mode, self.choice.label, self.seed, self.episode.name)


class Runner:
    """An experiment over a folder of results."""

    def __init__(
        self,
        experiment: Experiment,
        source: SourceSide,
        folder: str | os.PathLike[str],
        share: Share | None = None,
    ) -> None:
        self.experiment = experiment
        self.source = source
        self.share = share or Share()  # of every batch, where several processes do each run together
        self.images = data.load(experiment.base.data)
        self.results = Results(folder, self.settings())
        self._adapters: dict[str, Adapter] = {}

    def plan(self) -> list[Planned]:
        """All runs, in the order they are done: the methods share an episode's images."""
        count = len(self.images)
        return [
            Planned(part, choice, seed, episode)
            for part in self.experiment.parts
            for seed in self.experiment.seeds
            for episode in self.experiment.episodes(part.protocol, seed, count)
            for choice in part.choices
        ]

    def missing(self) -> list[Planned]:
        """The runs that are not done yet."""
        return [run for run in self.plan() if self.results.find(run.key, run.choice.config) is None]

    def prepare(self) -> None:
        """Makes what the missing runs need of the source side, so that other processes find it."""
        for choice in {planned.choice.label: planned.choice for planned in self.missing()}.values():
            needs = METHODS[choice.method].needs
            if needs == "stats" or self.experiment.frechet:
                self.source.grouped(choice)
            if needs in ("histograms", "posterior"):
                self.source.needs(choice, needs, choice.config.batch_size)
        if self.experiment.frechet:
            self.source.grouped()

    def work(
        self,
        started: Callable[[Planned], None] = lambda _: None,
        advance: Callable[[int], None] = lambda _: None,
        claim: Callable[[Planned], bool] = lambda _: True,
        begin: float = 0.0,
    ) -> None:
        """Does what is missing. `started` is told of each run, `advance` of the images dealt with.

        Where several processes do it, `claim` says whether a run falls to this one, and `begin`, from 0 to 1, where it
        begins to look for some: so that processes do not all make the same images.
        """
        stream: Stream | None = None
        before: Outcome | None = None
        missing = self._agreed()
        first = int(begin * len(missing))
        for planned in missing[first:] + missing[:first]:
            if not claim(planned):
                continue
            started(planned)
            if stream is None or stream.episode is not planned.episode:
                stream = self.stream(planned.episode)
                before = self._source_outcome(stream) if self.experiment.frechet else None
            adapter = self._adapter(planned.choice)
            reset_peak_memory()
            outcome = run(adapter, stream, planned.part.mode, self._reference(), advance)
            peak = max(self.share.all(peak_memory()))
            if self.share.rank == 0:
                self.results.add(self.record(planned, adapter, outcome, before, peak))

    def _agreed(self) -> list[Planned]:
        """What is missing, as rank 0 sees it: all ranks do the same runs in the same order."""
        missing = {planned.key for planned in self.missing()} if self.share.rank == 0 else set()
        wanted = self.share.all(missing)[0]
        return [planned for planned in self.plan() if planned.key in wanted]

    def stream(self, episode: Episode) -> Stream:
        base = self.experiment.base
        seed = self.experiment.corruption_seed
        return Stream(self.images, episode, self.source.preprocessing, base.corruption_preset, seed, self.share)

    def settings(self) -> dict[str, Any]:
        """What all the runs of a folder have in common."""
        experiment, base = self.experiment, self.experiment.base
        return {
            "experiment": experiment.kind,
            "dataset": base.name,
            "data": {"name": base.data, "images": len(self.images), "digest": self.images.digest()},
            "corruptions": {
                "names": list(experiment.corruptions),
                "severities": list(base.severities),
                "preset": base.corruption_preset,
                "seed": experiment.corruption_seed,
                "frost_is_standard": corruptions.frost_is_standard(),
                "official_files": isinstance(self.images, data.CorruptedSet),
            },
            "model": self.source.describe_model(),
            "source": {
                "data": base.source_data,
                "images": len(self.source.indices),
                "num_groups": self.source.options.num_groups or base.num_groups,
                "max_group_size": self.source.options.max_group_size,
                "group_seed": self.source.options.group_seed,
            },
            "limit": experiment.limit,
            "copies": base.copies,
            "versions": {"cafe_tta": cafe_tta.__version__, "torch": torch.__version__},
        }

    def record(
        self, planned: Planned, adapter: Adapter, outcome: Outcome, before: Outcome | None, peak: float
    ) -> dict[str, Any]:
        """A run in all its particulars."""
        settings, config = self.results.settings, asdict(planned.choice.config)
        stats = self.source.grouped(planned.choice) if adapter.needs == "stats" or self.experiment.frechet else None
        return {
            "format": FORMAT,
            **{
                key: settings[key]
                for key in ("experiment", "dataset", "data", "corruptions", "model", "limit", "copies")
            },
            "method": planned.choice.method,
            "label": planned.choice.label,
            "needs": adapter.needs,
            "config": config,
            "protocol": planned.part.protocol,
            "mode": planned.part.mode,
            "seed": planned.seed,
            "episode": describe(planned.episode),
            "source": settings["source"]
            | {"count": len(self.source.indices)}
            | (
                {}
                if stats is None
                else {
                    "num_groups": stats.meta["num_groups"],
                    "max_group_size": stats.meta["max_group_size"],
                    "seed": stats.meta["seed"],
                    "dead_dims": stats.meta["dead_dims"],
                    "group_sizes": sorted((len(dims) for dims in stats.groups), reverse=True),
                }
            ),
            "accuracy": outcome.accuracy,
            "by_domain": outcome.by_domain,
            "stream": [
                block.double().mean().item()
                for block in outcome.online_hits.tensor_split(max(1, min(BLOCKS, outcome.images // SMALLEST_BLOCK)))
                if len(block)
            ],
            "frechet_before": None if before is None else before.frechet,
            "frechet_after": outcome.frechet,
            "alignment_before": None if before is None else before.alignment,
            "alignment_after": outcome.alignment,
            "seconds": outcome.seconds,
            "images_per_second": outcome.images / outcome.seconds,
            "peak_memory_mb": peak,
            "steps": outcome.steps,
            "refused": outcome.refused,
            "versions": {"cafe_tta": cafe_tta.__version__, "python": platform.python_version(), **_versions()},
            "machine": {"processor": _processor(), "threads": torch.get_num_threads()}
            | ({} if self.share.ranks == 1 else {"processes": self.share.ranks}),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _adapter(self, choice: Choice) -> Adapter:
        if choice.label not in self._adapters:
            self._adapters.clear()  # one at a time: a large model's adapters would not fit side by side
            kind = METHODS[choice.method]
            needs = self.source.needs(choice, kind.needs, choice.config.batch_size)
            self._adapters[choice.label] = kind(self.source.classifier, needs, choice.config)
        return self._adapters[choice.label]

    def _reference(self) -> Reference | None:
        if not self.experiment.frechet:
            return None
        if not hasattr(self, "_frechet"):
            self._frechet = FrechetReference(self.source.stats.mean, self.source.stats.cov)
            self._gaussians = SourceGaussians(self.source.grouped(), EIGENVALUE_FLOOR)
        return Reference(self._frechet, self._gaussians)

    def _source_outcome(self, stream: Stream) -> Outcome:
        """The source classifier on the same images: where every method starts from."""
        unadapted = METHODS["source"](self.source.classifier)
        return run(unadapted, stream, "online", self._reference())


def describe(episode: Episode) -> dict[str, Any]:
    """What an episode holds: counts by domain, and a hash of which image comes when and how."""
    counts = np.bincount(episode.domain_of, minlength=len(episode.domains))
    digest = hashlib.sha256(episode.images.astype("<i8").tobytes() + episode.domain_of.astype("<i8").tobytes())
    domains = {str(domain): int(count) for domain, count in zip(episode.domains, counts, strict=True) if count}
    return {"name": episode.name, "images": len(episode), "domains": domains, "digest": digest.hexdigest()[:16]}


def reset_peak_memory() -> None:
    """Begins to measure anew, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # not Linux, or not allowed: the figure is then that of the whole process so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """Most memory used since `reset_peak_memory`, in MB."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
