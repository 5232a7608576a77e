"""A method chosen by name and texts, as commands and the server's settings do, and the adapter that it stands for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cafe_tta import data, source
from cafe_tta.adapter import Adapter, AdapterConfig
from cafe_tta.methods import configure, knowing_pixels, method
from cafe_tta.models import Model
from cafe_tta.options import Options, option, parse, split_assignments

_PANEL = "Method"


@dataclass(frozen=True)
class MethodOptions(Options):
    """Which method adapts, with which options and which values from the source domain.

    >>> MethodOptions(method="tent", set=["lr=0.01"]).config().lr
    0.01
    """

    method: str = option("cafe", "The method that adapts; `cafe-tta methods` lists them.", panel=_PANEL)
    preset: str | None = option(None, "A set of options of the method, by name.", panel=_PANEL)
    set: list[str] = option(
        [], "An option of the method, such as lr=0.01. May be repeated.", panel=_PANEL, metavar="OPTION=VALUE"
    )
    source: list[str] = option(
        [],
        "What the method needs from the source domain: a file that `cafe-tta stats` or `train` made, or, for a method "
        "that needs data, labelled source images such as digits:train. May be repeated.",
        panel=_PANEL,
        metavar="FILE",
        aliases=("stats", "histograms", "posterior", "source_data"),
    )

    @property
    def needs(self) -> str | None:
        return method(self.method).needs

    def config(self, **changes: Any) -> AdapterConfig:
        """The options of the method: those of the preset, or the defaults, with `set` and `changes` applied."""
        texts = split_assignments(self.set)
        options = parse(method(self.method).Config, texts, self.method)
        config: AdapterConfig = configure(self.method, self.preset, **options, **changes)
        return config

    def require_source(self) -> None:
        """Raises where the method needs source values and none are given: before anything slow is loaded."""
        if self.needs is not None and not self.source:
            how = source.source_kind(self.needs).how_to_make
            raise ValueError(f"{self.method} needs {self.needs} from the source domain, but `source` is empty; {how}")

    def sources(self, model: Model, seed: int = 0) -> dict[str, Any]:
        """The source values by kind, each checked against the model."""
        self.require_source()
        labelled = [text for text in self.source if self.needs == "data" and not Path(text).is_file()]
        values: dict[str, Any] = dict(source.load_all(text for text in self.source if text not in labelled))
        for value in values.values():
            value.check_belongs_to(model.classifier)
        if labelled:
            values["data"] = _labelled_loader(labelled, model, self.config().batch_size, seed)
        if self.needs is not None and self.needs not in values:
            how = source.source_kind(self.needs).how_to_make
            raise ValueError(
                f"{self.method} needs {self.needs} from the source domain, but `source` has {', '.join(values)}; {how}"
            )
        return values

    def adapter(self, model: Model, sources: dict[str, Any], config: AdapterConfig | None = None) -> Adapter:
        """The adapter of the model."""
        needed = sources.get(self.needs or "stats")  # statistics are optional: for `normalisation=unmix`
        known = knowing_pixels(config or self.config(), model.preprocessing.mean, model.preprocessing.std)
        return method(self.method)(model.classifier, needed, known)


def _labelled_loader(specs: list[str], model: Model, batch_size: int, seed: int) -> data.Loader:
    if len(specs) > 1:
        raise ValueError(f"expected one set of labelled source images, but got {', '.join(specs)}")
    imageset = data.load(specs[0])
    labels, reason = data.match_labels(imageset, model.classes, model.classifier.num_classes)
    if labels is None or (labels < 0).any():
        raise ValueError(f"expected a label of the model for every image of {specs[0]}; {reason or 'some have none'}")
    order = np.random.default_rng(seed).permutation(len(imageset))
    order = order[: max(len(order) // batch_size, 1) * batch_size]  # a last batch of one image could not be normalised
    return data.Loader(imageset, model.preprocessing, batch_size, order=order, labels=labels)
