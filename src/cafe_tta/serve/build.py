"""The service that settings describe: its model, method and source values are loaded here, and only here by name."""

import os
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cafe_tta.loading import Model, choose_device, load_model
from cafe_tta.methods import configure
from cafe_tta.methods import method as method_named
from cafe_tta.options import Described, _Rule, require_known, split_assignments
from cafe_tta.serve.service import Service
from cafe_tta.serve.settings import Settings
from cafe_tta.source.histograms import SourceHistograms
from cafe_tta.source.swag import Posterior
from cafe_tta.stats import SourceStats

EMBEDDED = "digits"


@dataclass(frozen=True)
class Built:
    """A service that has not been started, its model, and what its method was configured with."""

    service: Service
    model: Model
    statistics: SourceStats | None
    config: Any


def build(settings: Settings, say: Callable[[str], None] = lambda _: None) -> Built:
    """Builds the service that the settings describe. `say` is told what takes long."""
    kind = method_named(settings.method)
    config = _configuration(settings)
    model, statistics = _model(settings, say)
    adapter = kind(model.classifier, _source(settings, kind.needs, statistics), config)
    service = Service(adapter, replace(settings, name=settings.name or _name(settings.model)), statistics)
    service.class_names = model.classes
    return Built(service, model, statistics, config)


def _source(settings: Settings, needs: str | None, statistics: SourceStats | None) -> Any:
    """What the method needs of the source domain, from the files that the settings name."""
    if needs is None:
        return None
    if needs == "data":
        raise ValueError(f"{settings.method} needs labelled source images while it adapts, which a server has not")
    if needs == "stats":
        if statistics is None:
            raise ValueError(
                f"{settings.method} needs `stats`, a file of source statistics; "
                "make one with: cafe-tta stats --model … --data SOURCE --output FILE"
            )
        return statistics
    path = {"histograms": settings.histograms, "posterior": settings.posterior}[needs]
    if path is None:
        raise ValueError(f"{settings.method} needs `{needs}`, a file; see cafe-tta methods")
    return (SourceHistograms if needs == "histograms" else Posterior).load(path)


def _model(settings: Settings, say: Callable[[str], None]) -> tuple[Model, SourceStats | None]:
    if settings.model is None:
        given = [name for name in ("weights", "stats", "num_classes") if getattr(settings, name) is not None]
        if given:
            raise ValueError(f"expected `model` with `{given[0]}`; without it, digits are served")
        from cafe_tta.bench.embedded import embedded_digits

        embedded = embedded_digits(say=say)
        embedded.classifier.to(choose_device(settings.device))
        return embedded.model, embedded.stats
    names = ("weights", "num_classes", "pretrained", "image_size", "mean", "std", "head", "device")
    model = load_model(settings.model, **{name: getattr(settings, name) for name in names})
    statistics = None if settings.stats is None else SourceStats.load(settings.stats)
    return model, statistics


def _configuration(settings: Settings) -> Any:
    """The configuration of the method: its preset, with the options that `set` names changed."""
    hints = typing.get_type_hints(method_named(settings.method).Config)
    texts = split_assignments(settings.set)
    require_known(texts, hints, settings.method)
    options = {name: Described(name, hints[name], None, _Rule("")).parse(text) for name, text in texts.items()}
    return configure(settings.method, settings.preset, **options)


def _name(model: str | None) -> str:
    """A name for addresses: of the file, or of the architecture."""
    if model is None:
        return EMBEDDED
    word = Path(model).stem if os.path.exists(model) else model.partition(":")[2]
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in word)
