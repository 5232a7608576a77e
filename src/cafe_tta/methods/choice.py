"""A method chosen by name and texts, as commands and the server's settings do, and the adapter that it stands for."""

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cafe_tta import data, models, source
from cafe_tta.adapter import Adapter, AdapterConfig
from cafe_tta.methods import SavedState, configure, knowing_pixels, load_adapter, method, method_name
from cafe_tta.models import Model, ModelOptions
from cafe_tta.options import Options, option, parse, split_assignments
from cafe_tta.source import SourceValue
from cafe_tta.storage import differences

METHOD_PANEL = "Method"
METHOD_HELP = "The method that adapts: `cafe-tta methods` lists them, and package.module:Class is one of your own."


class Chosen(NamedTuple):
    """What an adapter is made of."""

    model: Model
    sources: dict[str, Any]  # source values by kind
    notes: list[str]  # how images are read, for the user


@dataclass(frozen=True)
class MethodOptions(Options):
    """Which method adapts, with which options and which values from the source domain.

    >>> MethodOptions(method="tent", set=["lr=0.01"]).config().lr
    0.01
    """

    method: str = option("cafe-plus", METHOD_HELP, panel=METHOD_PANEL)
    preset: str | None = option(None, "A set of options of the method, by name.", panel=METHOD_PANEL)
    set: list[str] = option(
        [], "An option of the method, such as lr=0.01. May be repeated.", panel=METHOD_PANEL, metavar="OPTION=VALUE"
    )
    source: list[str] = option(
        [],
        "What the method needs from the source domain: a file that `cafe-tta stats` or `train` made, or, for a method "
        "that needs data, labelled source images such as digits:train; for normalisation=unmix also statistics. May be "
        "repeated.",
        panel=METHOD_PANEL,
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

    @property
    def kinds(self) -> list[str]:
        """The kinds of source values that the method needs with these options: unmixing takes the styles of `stats`."""
        needed = [] if self.needs is None else [self.needs]
        return [*needed, "stats"] if self.config().unmixes and "stats" not in needed else needed

    def require_source(self) -> None:
        """Raises where the method needs source values and none are given: before anything slow is loaded."""
        if self.kinds and not self.source:
            self._missing(self.kinds[0], "`source` is empty")

    def _missing(self, kind: str, but: str) -> NoReturn:
        why = "" if kind == self.needs else " to unmix"
        how = source.source_kind(kind).how_to_make
        raise ValueError(f"{self.method} needs {kind} from the source domain{why}, but {but}; {how}")

    def load(self, options: ModelOptions, seed: int = 0) -> "Chosen":
        """The model, its images read as those of the source values were, and the source values.

        Options that ask for another way of reading images are refused.
        """
        self.require_source()
        return self._load(self._load_files(), options, seed)

    def load_state(
        self, path: str | os.PathLike[str], options: ModelOptions, seed: int = 0, given: Collection[str] = ()
    ) -> tuple["Chosen", Adapter]:
        """The adapter of a saved state, with its model and source values: of `source`, or else those in the file.

        `given` names the options of this object that were chosen by the user: the state must agree with them.
        """
        kept = SavedState.read(path)
        if "method" in given and method_name(self.method) != kept.method:
            raise ValueError(f"{path} is a state of {kept.method!r}, but `method` is {self.method!r}; leave it out")
        ours = replace(self, method=kept.method)
        if {"set", "preset"} & set(given):
            saved = asdict(ours.config()) | dict(kept.meta["config"])
            if shown := differences(saved, asdict(ours.config(batch_size=saved["batch_size"]))):
                raise ValueError(f"{path} was saved with other options: {shown}; leave them out")
        values = ours._load_files()
        if not values and kept.source is not None:
            values = {str(path): kept.source}
        chosen = ours._load(values, options, seed, complete=kept.source is None)
        needed = None if ours.needs is None or not self.source else chosen.sources.get(ours.needs)
        return chosen, load_adapter(path, chosen.model.classifier, needed)

    def _load(
        self, values: dict[str, SourceValue], options: ModelOptions, seed: int, complete: bool = True
    ) -> "Chosen":
        given = {"size": options.image_size, "mean": options.mean, "std": options.std}
        record = source.agreed_record(values, given)
        model = _with_classes(models.load_classifier(options, preprocessing=record.preprocessing), record.classes)
        notes = [f"images are read at {model.preprocessing.describe()}"]
        for name in (name for name, value in values.items() if value.images.preprocessing is None):
            notes.append(f"note: {name} does not say how its images were read; it should have been in the same way")
        return Chosen(model, self._checked(values, model, seed, complete), notes)

    def sources(self, model: Model, seed: int = 0) -> dict[str, Any]:
        """The source values by kind, each checked against the model."""
        self.require_source()
        values = self._load_files()
        source.agreed_record(values, vars(model.preprocessing))
        return self._checked(values, model, seed)

    @property
    def _labelled(self) -> list[str]:
        return [text for text in self.source if self.needs == "data" and not Path(text).is_file()]

    def _load_files(self) -> dict[str, SourceValue]:
        """The source values by the names of their files."""
        names = [text for text in self.source if text not in self._labelled]
        return dict(zip(names, source.load_all(names).values(), strict=True))

    def _checked(
        self, loaded: dict[str, SourceValue], model: Model, seed: int, complete: bool = True
    ) -> dict[str, Any]:
        values: dict[str, Any] = {value.kind: value for value in loaded.values()}
        for value in values.values():
            value.check_belongs_to(model.classifier)
        if self._labelled:
            values["data"] = _labelled_loader(self._labelled, model, self.config().batch_size, seed)
        for kind in self.kinds if complete else ():
            if kind not in values:
                self._missing(kind, f"`source` has {', '.join(values)}")
        return values

    def adapter(self, model: Model, sources: dict[str, Any], config: AdapterConfig | None = None) -> Adapter:
        """The adapter of the model."""
        needed = None if self.needs is None else sources[self.needs]
        styles = sources["stats"].styles if "stats" in sources else None
        known = knowing_pixels(config or self.config(), model.preprocessing.mean, model.preprocessing.std)
        return method(self.method)(model.classifier, needed, known, styles=styles)


def _with_classes(model: Model, classes: tuple[str, ...] | None) -> Model:
    """The model, with the names of the classes that the source values know, where it knows none."""
    if model.classes is None or classes is None:
        return model if classes is None else replace(model, classes=classes)
    if model.classes != classes and sorted(model.classes) == sorted(classes):
        number = next(i for i, pair in enumerate(zip(model.classes, classes, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"the source values have the same classes as the model in another order: class {number} is "
            f"{classes[number]!r} there, {model.classes[number]!r} here"
        )
    return model


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
