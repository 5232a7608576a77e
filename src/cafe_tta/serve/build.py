"""The service that settings describe: its model, method and source values are loaded here, and only here by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cafe_tta import models, options, source
from cafe_tta.methods import configure
from cafe_tta.methods import method as method_named
from cafe_tta.serve.service import Service
from cafe_tta.serve.settings import Settings

EMBEDDED = "digits"


@dataclass(frozen=True)
class Built:
    """A service that has not been started, its model, and what its method was configured with."""

    service: Service
    model: models.Model
    statistics: source.SourceStats | None
    config: Any


def build(settings: Settings, say: Callable[[str], None] = lambda _: None) -> Built:
    """Builds the service that the settings describe. `say` receives a line before anything that takes long."""
    kind = method_named(settings.method)
    given = options.parse(kind.Config, options.split_assignments(settings.set), settings.method)
    config = configure(settings.method, settings.preset, **given)
    model, values = _model_and_source(settings, say)
    if kind.needs == "data":
        raise ValueError(f"{settings.method} needs labelled source images while it adapts, which a server has not")
    if kind.needs is not None and kind.needs not in values:
        raise ValueError(
            f"{settings.method} needs {kind.needs} of the source domain, but got none; "
            "give the file that `cafe-tta stats` or `cafe-tta train` made as `source`"
        )
    adapter = kind(model.classifier, values.get(kind.needs or ""), config)
    statistics: Any = values.get("stats")
    service = Service(adapter, replace(settings, name=settings.name or _name(settings.model)), statistics)
    service.class_names = model.classes
    return Built(service, model, statistics, config)


def _model_and_source(
    settings: Settings, say: Callable[[str], None]
) -> tuple[models.Model, dict[str, source.SourceValue]]:
    older = (settings.stats, settings.histograms, settings.posterior)
    files = [*settings.source, *(path for path in older if path is not None)]
    if settings.model is not None:
        names = [described.name for described in options.describe(models.ModelOptions)]
        chosen = models.ModelOptions(**{name: getattr(settings, name) for name in names})
        return models.load_classifier(chosen), source.load_all(files)
    given = {"source": files, "weights": settings.weights, "num_classes": settings.num_classes}
    for name, value in given.items():
        if value:
            raise ValueError(f"expected `model` with `{name}`; without it, the embedded digits are served")
    from cafe_tta.bench.embedded import embedded_digits

    embedded = embedded_digits(say=say)
    embedded.classifier.to(models.choose_device(settings.device))
    return embedded.model, {"stats": embedded.stats}


def _name(model: str | Path | None) -> str:
    """A name for addresses: of the file, or of the architecture."""
    if model is None:
        return EMBEDDED
    word = Path(model).stem if os.path.exists(model) else str(model).partition(":")[2]
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in word)
