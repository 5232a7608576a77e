"""Source values from a set of images: by one process, by shards that are merged later, or by the ranks of a job."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from cafe_tta import data
from cafe_tta.classifier import evaluating
from cafe_tta.distributed import Job
from cafe_tta.models import Model
from cafe_tta.options import Options, option
from cafe_tta.source import SourceWarning, source_kind
from cafe_tta.source.shards import Part, Shard, bounds, merge_ranks
from cafe_tta.source.stats import FeatureStats, SourceStats
from cafe_tta.source.value import SourceValue

_PANEL = "Statistics"
LOOKED_AT = 512  # images: do the names of their folders fit the answers?
FEW_CLASSES = 50  # with more, these images are too few to tell which class is which
BETTER = 0.2  # of the images: if other names for the classes fit so many more, something is wrong


@dataclass(frozen=True)
class SourceOptions(Options):
    """Which source images are read, and how their statistics are grouped.

    >>> SourceOptions(limit=1000).batch_size
    256
    """

    num_groups: int | None = option(
        None,
        "Number of groups of correlated features; by default 128, or one for each 16 features of a smaller model.",
        least=1,
        panel=_PANEL,
    )
    max_group_size: int = option(
        128, "Wider groups are split: keep it below the batch size. 0 is no limit.", least=0, panel=_PANEL
    )
    full: bool = option(
        False,
        "Keep the whole covariance too: the file is larger, and `cafe-tta adapt` can tell the Fréchet distance.",
        panel=_PANEL,
        flag="--full",
    )
    limit: int | None = option(None, "Read only this many images, drawn at random.", least=1)
    seed: int = option(0, "Seed of the grouping, and of the images that `limit` draws.", least=0)
    batch_size: int = option(256, "Images per batch.", least=1)

    def group(self, stats: FeatureStats) -> SourceStats:
        """The statistics in groups, as these options say."""
        return stats.group(
            self.num_groups, seed=self.seed, max_group_size=self.max_group_size or None, keep_full=self.full
        )


class SourceImages:
    """The source images that this process reads: all of them, a shard, or a rank's part."""

    def __init__(
        self,
        model: Model,
        imageset: data.ImageSet,
        options: SourceOptions | None = None,
        *,
        shard: Shard | None = None,
        job: Job | None = None,
        workers: int = 0,
    ) -> None:
        self.model, self.imageset, self.options = model, imageset, options or SourceOptions()
        self.shard, self.job, self.workers = shard, job, workers
        order = np.arange(len(imageset))
        if self.options.limit is not None:
            # At random: the first images of class folders would all be of one class.
            order = np.random.default_rng(self.options.seed).permutation(len(imageset))[: self.options.limit]
        self.order = np.sort(order)
        batch_size = self.options.batch_size
        start, stop = 0, len(self.order)
        if shard is not None:
            start, stop = bounds(stop, batch_size, shard.number - 1, shard.count)
        self.total = stop - start  # images of all ranks
        if job is not None:
            start, stop = (start + edge for edge in bounds(self.total, batch_size, job.rank, job.world))
        self.start, self.own = start, self.order[start:stop]

    def loader(self, advance: data.Advance = lambda amount: None, labels: data.Labels | None = None) -> data.Loader:
        """The batches of this process."""
        return data.Loader(
            self.imageset,
            self.model.preprocessing,
            self.options.batch_size,
            order=self.own,
            labels=labels,
            workers=self.workers,
            advance=advance,
        )

    def feature_stats(self, advance: data.Advance = lambda amount: None) -> Part | None:
        """Statistics of the features; of all ranks together on rank 0, and None on the others."""
        loader = self.loader(advance if self.job is None else self.job.advance)
        if self.job is not None:
            self.job.on_progress = advance
        classifier = self.model.classifier
        self._check_names()
        stats = FeatureStats.fit_part(classifier, loader, self.start, self.model.preprocessing, self.classes())
        part: Part | None = Part(stats, classifier.identity(), loader.unreadable)
        if self.job is not None and part is not None:
            part = merge_ranks(self.job, part, self.whole())
            self.job.on_progress = None
        return part

    def whole(self) -> dict[str, Any]:
        """What all parts have in common; not paths, which may differ between machines."""
        options = self.options
        drawn = None if options.limit is None else options.seed
        common = {"data": self.imageset.digest(), "images": len(self.order), "batch_size": options.batch_size}
        return common | {"seed": drawn, "preprocessing": self.model.preprocessing.record()}

    def value(self, kind: str, advance: data.Advance = lambda amount: None) -> SourceValue:
        """A source value of another kind, computed by its own `fit` in one process."""
        labels, _ = data.match_labels(self.imageset, self.model.classes, self.model.classifier.num_classes)
        value = source_kind(kind).fit(self.model.classifier, self.loader(advance, labels))
        assert isinstance(value, SourceValue)
        return value.of_images(self.model.preprocessing, self.classes())

    def _check_names(self) -> None:
        """Warns where the classes, named by the folders of the images, are not in the order of the model's outputs."""
        labels, names = self.imageset.labels, self.classes()
        if labels is None or names is None or self.model.classes is not None or len(names) > FEW_CLASSES:
            return
        drawn = np.random.default_rng(self.options.seed).permutation(self.own)[:LOOKED_AT]
        loader = data.Loader(self.imageset, self.model.preprocessing, self.options.batch_size, order=drawn)
        counts = np.zeros((len(names), len(names)))  # images of each folder that are given each class
        classifier = self.model.classifier
        with torch.no_grad(), evaluating(classifier):
            for batch in loader.batches():
                answers = classifier(batch.images.to(classifier.head.weight)).argmax(1).cpu().numpy()
                np.add.at(counts, (labels[batch.indices], answers), 1)
        total = max(counts.sum(), 1)
        right, best = counts.trace() / total, counts[linear_sum_assignment(-counts)].sum() / total
        if best > right + BETTER:
            warnings.warn(
                f"by the names of their folders, {right:.0%} of {total:.0f} source images are answered correctly, and "
                f"{best:.0%} if the classes are named in another order; folders are taken in alphabetical order "
                f"({', '.join(names[:3])}, …): give the names in the order of the model's outputs with --classes FILE",
                SourceWarning,
                stacklevel=3,
            )

    def classes(self) -> tuple[str, ...] | None:
        """The names of the model's classes: its own, or those of the images, if there are as many."""
        named = self.imageset.classes
        if self.model.classes is not None or named is None or all(name.isdecimal() for name in named):
            return self.model.classes
        return named if len(named) == self.model.classifier.num_classes else None
