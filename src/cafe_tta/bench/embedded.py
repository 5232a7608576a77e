"""The embedded model of `serve` and `simulate`: a small ResNet of handwritten digits, trained once and then kept."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cafe_tta.bench.experiments import DATASETS
from cafe_tta.bench.source_side import SourceSide
from cafe_tta.classifier import SplitClassifier
from cafe_tta.data.digits import CLASSES
from cafe_tta.locking import lock_file
from cafe_tta.models import Model
from cafe_tta.source import SourceStats


@dataclass(frozen=True)
class Embedded:
    """The embedded model, with the statistics of its training images."""

    model: Model
    stats: SourceStats
    side: SourceSide

    @property
    def classifier(self) -> SplitClassifier:
        return self.model.classifier

    @property
    def folder(self) -> Path:
        """Where the model and its source values are kept."""
        return self.side.folder

    def sources(self, kind: str | None) -> dict[str, Any]:
        """The statistics, and a source value of another kind, if one is needed."""
        return {"stats": self.stats} | ({} if kind in (None, "stats") else {kind: self.side.value(kind)})


def cache_folder() -> Path:
    """Where the model is kept: in the folder that CAFE_TTA_CACHE names, or in the user's cache."""
    return Path(os.environ.get("CAFE_TTA_CACHE") or "~/.cache/cafe-tta").expanduser() / "digits"


def embedded_digits(folder: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Embedded:
    """The embedded model. The first call trains it, in half a minute; later ones, of any process, read it."""
    folder = cache_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    # A server and a simulator that are started together: one trains, the other waits.
    with lock_file(folder / ".lock", wait=True):
        side = SourceSide(DATASETS["digits"], folder, say=say)
        stats = side.grouped()
    model = Model(side.classifier.eval(), str(side.describe_model()["architecture"]), side.preprocessing, CLASSES)
    return Embedded(model, stats, side)
