"""The embedded model of `serve` and `simulate`: a small ResNet of handwritten digits, trained once and then kept."""

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cafe_tta.classifier import SplitClassifier
from cafe_tta.cli.inputs import Model
from cafe_tta.source.stats import SourceStats


@dataclass(frozen=True)
class Embedded:
    """The embedded model, with the statistics of its training images."""

    model: Model
    stats: SourceStats
    folder: Path  # where both are kept

    @property
    def classifier(self) -> SplitClassifier:
        return self.model.classifier


def cache_folder() -> Path:
    """Where the model is kept: in the folder that CAFE_TTA_CACHE names, or in the user's cache."""
    return Path(os.environ.get("CAFE_TTA_CACHE") or "~/.cache/cafe-tta").expanduser() / "digits"


def embedded_digits(folder: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Embedded:
    """The embedded model. The first call trains it, in half a minute; later ones, of any process, read it."""
    from cafe_tta.bench.experiments import DATASETS  # loads scikit-learn and more: only when it is needed
    from cafe_tta.bench.source_side import SourceSide
    from cafe_tta.data.digits import CLASSES

    folder = cache_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a server and a simulator started together: one trains, the other waits
        side = SourceSide(DATASETS["digits"], folder, say=say)
        stats = side.grouped()
    model = Model(side.classifier.eval(), str(side.describe_model()["architecture"]), side.preprocessing, CLASSES)
    return Embedded(model, stats, folder)
