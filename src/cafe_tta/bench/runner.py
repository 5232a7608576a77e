"""Many runs: every method, episode and seed of a plan, each recorded as it ends, none done twice."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from cafe_tta import corruptions, data, storage
from cafe_tta._version import __version__
from cafe_tta.adapter import Adapter
from cafe_tta.bench import provenance
from cafe_tta.bench.cost import Memory
from cafe_tta.bench.evaluate import Distance, Outcome, Stream, distance_before, evaluate
from cafe_tta.bench.experiments import Plan, Row
from cafe_tta.bench.pace import Clock
from cafe_tta.bench.protocols import Episode
from cafe_tta.bench.records import RECORDS, Record, Results, packed, read
from cafe_tta.bench.source_side import SourceSide
from cafe_tta.distributed import Share
from cafe_tta.methods import METHODS, knowing_pixels
from cafe_tta.source import Reference

BLOCKS, SMALLEST_BLOCK = 20, 50  # points of the curve along a stream, and the fewest images of a point
SHARED_SETTINGS = ("experiment", "dataset", "data", "corruptions", "model", "limit", "copies")  # kept in every record


@dataclass(frozen=True)
class Planned:
    """A run that the plan asks for."""

    protocol: str
    mode: str
    row: Row
    seed: int
    episode: Episode

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.protocol, self.mode, self.row.label, self.seed, self.episode.name)


def require_domains(plan: Plan, images: data.ImageSet) -> None:
    """Raises where an image set lacks a corruption, or this machine what makes it: before anything slow, or written."""
    episodes = [
        episode
        for protocol in plan.protocols
        for episode in plan.episodes(protocol, plan.seeds[0], len(images), images.labels)
    ]
    for domain in sorted({domain for episode in episodes for domain in episode.domains if domain.severity}):
        if isinstance(images, data.CorruptedSet):
            images.corrupted([], domain.corruption, domain.severity)
        else:
            corruptions.CORRUPTIONS[corruptions.corruption_name(domain.corruption)].load()


class Runner:
    """A plan over a folder of results."""

    def __init__(
        self,
        plan: Plan,
        source: SourceSide,
        folder: str | os.PathLike[str],
        share: Share | None = None,
        images: data.ImageSet | None = None,
    ) -> None:
        self.plan = plan
        self.source = source
        self.share = share or Share()  # of every batch, where several processes do each run together
        self.images = source.of_one_size(data.load(plan.dataset.data) if images is None else images)
        self.labels = source.labels_of(self.images)
        self.results = Results(folder, self.settings())
        self._code = provenance.code()
        self._adapters: dict[str, Adapter] = {}
        self._made_reference: Reference | None = None

    def runs(self) -> list[Planned]:
        """All runs, in the order in which they are done: the methods share an episode's images."""
        count = len(self.images)
        return [
            Planned(protocol, self.plan.mode, row, seed, episode)
            for protocol in self.plan.protocols
            for seed in self.plan.seeds
            for episode in self.plan.episodes(protocol, seed, count, self.labels)
            for row in self.plan.rows
        ]

    def missing(self) -> list[Planned]:
        """The runs that are not done yet."""
        return [run for run in self.runs() if self.results.find(run.key, run.row.config, _digest(run.row)) is None]

    def notes(self) -> list[str]:
        """What a user should know before the work begins: what was done earlier, and what was lost."""
        planned, missing = len(self.runs()), len(self.missing())
        notes = ["note: the last record was cut off by a crash and is done again"] if self.results.dropped else []
        notes += self.plan.notes()
        if isinstance(self.images, data.FittedFolder):
            notes.append(f"note: the images differ in size; they are read at {self.images.read_as}, then corrupted")
        return notes + ([f"{planned - missing} of {planned} runs are done already"] if missing < planned else [])

    def progress(self) -> str:
        """How far the folder is, counting the records of all processes."""
        folder = self.results.folder
        done = len(read(folder / RECORDS))
        return f"{done} of {len(self.runs())} runs are done and kept in {folder}; start again to go on"

    def prepare(self) -> None:
        """Makes what the missing runs need of the source side, so that other processes find it."""
        for row in {planned.row.label: planned.row for planned in self.missing()}.values():
            self.source.needed(row)
            self.source.styles(row)
        if self.plan.frechet:
            self.source.grouped()

    def work(
        self,
        started: Callable[[Planned], None] = lambda _: None,
        advance: Callable[[int], None] = lambda _: None,
        claim: Callable[[Planned], bool] = lambda _: True,
        begin: float = 0.0,
    ) -> None:
        """Does the missing runs. `started` is called with each run, `advance` with the number of images of each batch.

        Where several processes do it, `claim` says whether a run falls to this one, and `begin`, from 0 to 1, where in
        the list it begins to look for runs: so that processes do not all make the same images.
        """
        stream: Stream | None = None
        before = Distance()
        missing = self._agreed()
        first = int(begin * len(missing))
        for planned in missing[first:] + missing[:first]:
            if not claim(planned):
                continue
            started(planned)
            if stream is None or stream.episode is not planned.episode:
                stream = self.stream(planned.episode)
                if reference := self._reference():
                    before = distance_before(self.source.classifier, stream, reference)
            adapter = self._adapter(planned.row)
            stream.make()
            memory = Memory()
            clock = self._clock(planned.row)
            outcome = evaluate(adapter, stream, self.plan.mode, self._reference(), advance, clock)
            peaks, added = self.share.all(memory.peak), self.share.all(memory.added)
            if self.share.rank == 0:
                made = self.record(planned, outcome, before, _largest(peaks), _largest(added))
                self.results.add(made if clock is None else replace(made, pace=self._describe_pace(clock)))

    def _clock(self, row: Row) -> Clock | None:
        return Clock(self.plan.pace.cost(row.label), self.source.classifier) if self.plan.pace else None

    def _describe_pace(self, clock: Clock) -> dict[str, Any]:
        return {"setting": self.results.settings["pace"], "cost": clock.mean_cost, "missed": clock.missed}

    def _agreed(self) -> list[Planned]:
        """The missing runs, as rank 0 sees them: all ranks do the same runs in the same order."""
        missing = {planned.key for planned in self.missing()} if self.share.rank == 0 else set()
        wanted = self.share.all(missing)[0]
        return [planned for planned in self.runs() if planned.key in wanted]

    def stream(self, episode: Episode) -> Stream:
        """The corrupted images of an episode."""
        preset, seed = self.plan.dataset.corruption_preset, self.plan.corruption_seed
        return Stream(self.images, episode, self.source.preprocessing, preset, seed, self.share, self.labels)

    def settings(self) -> dict[str, Any]:
        """What all the runs of a folder have in common."""
        plan, dataset = self.plan, self.plan.dataset
        return {
            "experiment": plan.experiment,
            "dataset": dataset.name,
            "data": {"name": dataset.data, "images": len(self.images), "digest": self.images.digest()},
            "corruptions": {
                "names": list(plan.corruptions),
                "severities": list(dataset.severities),
                "preset": dataset.corruption_preset,
                "seed": plan.corruption_seed,
                "frost_is_standard": corruptions.frost_is_standard(),
                "official_files": isinstance(self.images, data.CorruptedSet),
            },
            "model": self.source.describe_model(),
            "source": {
                "data": dataset.source_data,
                "images": len(self.source.indices),
                "digest": self.source.images.digest(),
                "chosen": hashlib.sha256(np.asarray(self.source.indices, "<i8").tobytes()).hexdigest()[:16],
                "num_groups": self.source.options.num_groups or dataset.num_groups,
                "max_group_size": self.source.options.max_group_size or None,
                "group_seed": self.source.group_seed,
            },
            "limit": plan.limit,
            "copies": dataset.copies,
            "versions": {"cafe_tta": __version__, "torch": torch.__version__},
            **({"pace": plan.pace.text} if plan.pace else {}),
        }

    def record(
        self, planned: Planned, outcome: Outcome, before: Distance, peak: float | None, added: float | None
    ) -> Record:
        """A run with everything that decided it and everything that came of it."""
        blocks = outcome.online_hits.tensor_split(max(1, min(BLOCKS, outcome.images // SMALLEST_BLOCK)))
        processes = {} if self.share.ranks == 1 else {"processes": self.share.ranks}
        return Record(
            **{key: self.results.settings[key] for key in SHARED_SETTINGS},
            method=planned.row.method,
            label=planned.row.label,
            needs=planned.row.needs or ("stats" if planned.row.config.unmixes else None),
            config=asdict(planned.row.config),
            protocol=planned.protocol,
            mode=planned.mode,
            seed=planned.seed,
            episode=planned.episode.summary(),
            source=self._describe_source(planned.row),
            accuracy=outcome.accuracy,
            by_domain=outcome.by_domain,
            stream=tuple(block.double().mean().item() for block in blocks if len(block)),
            frechet_before=before.frechet,
            frechet_after=outcome.distance.frechet,
            alignment_before=before.alignment,
            alignment_after=outcome.distance.alignment,
            seconds=outcome.seconds,
            peak_memory_mb=peak,
            run_memory_mb=added,
            forward_images=outcome.forward,
            backward_images=outcome.backward,
            calibration_error=outcome.calibration_error,
            hits=packed(outcome.hits.numpy()),
            steps=outcome.steps,
            refused=outcome.refused,
            versions=provenance.versions(),
            machine=provenance.machine() | processes,
            code=self._code | ({"method": digest} if (digest := _digest(planned.row)) else {}),
            command=provenance.command(),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _describe_source(self, row: Row) -> dict[str, Any]:
        facts = self.results.settings["source"] | {"count": len(self.source.indices)}
        if row.needs == "stats" or self.plan.frechet:
            stats = self.source.grouped(row)
            facts |= {key: stats.meta[key] for key in ("num_groups", "max_group_size", "seed", "dead_dims")}
            facts["group_sizes"] = sorted((len(dims) for dims in stats.groups), reverse=True)
            sizes = torch.tensor([len(dims) for dims in stats.groups])
            facts["groups_digest"] = storage.tensor_digest(torch.cat([sizes, *stats.groups]))
        return dict(facts) | self.source.facts(row, distances=self.plan.frechet)

    def _adapter(self, row: Row) -> Adapter:
        if row.label not in self._adapters:
            self._adapters.clear()  # one at a time: a large model's adapters would not fit side by side
            needed, styles = self.source.needed(row), self.source.styles(row)
            pixels = self.source.preprocessing
            config = knowing_pixels(row.config, pixels.mean, pixels.std)
            self._adapters[row.label] = METHODS[row.method](self.source.classifier, needed, config, styles=styles)
        return self._adapters[row.label]

    def _reference(self) -> Reference | None:
        if self.plan.frechet and self._made_reference is None:
            self._made_reference = Reference(replace(self.source.grouped(), full_cov=self.source.stats.cov))
        return self._made_reference


def _digest(row: Row) -> str | None:
    return provenance.method_digest(METHODS[row.method])


def _largest(values: list[float | None]) -> float | None:
    """Of all ranks; None where one of them does not know."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
