"""The service that settings describe: its model, method and source values are loaded here, and only here by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cafe_tta.adapter import AdapterConfig
from cafe_tta.models import Model, ModelOptions, choose_device, load_classifier
from cafe_tta.options import describe
from cafe_tta.serve.service import Service
from cafe_tta.serve.settings import Settings
from cafe_tta.source import SourceStats

EMBEDDED = "digits"


@dataclass(frozen=True)
class Built:
    """A service that has not been started, its model, and what its method was configured with."""

    service: Service
    model: Model
    statistics: SourceStats | None
    config: AdapterConfig


def build(settings: Settings, say: Callable[[str], None] = lambda _: None) -> Built:
    """Builds the service that the settings describe. `say` receives a line before anything that takes long."""
    config = settings.config()
    if settings.needs == "data":
        raise ValueError(f"{settings.method} needs labelled source images while it adapts, which a server has not")
    model, sources = _model_and_sources(settings, say)
    adapter = settings.adapter(model, sources, config)
    statistics = sources.get("stats")
    service = Service(adapter, replace(settings, name=settings.name or _name(settings.model)), statistics)
    service.class_names = model.classes
    return Built(service, model, statistics, config)


def _model_and_sources(settings: Settings, say: Callable[[str], None]) -> tuple[Model, dict[str, Any]]:
    if settings.model is not None:
        settings.require_source()
        names = [described.name for described in describe(ModelOptions)]
        model = load_classifier(ModelOptions(**{name: getattr(settings, name) for name in names}))
        return model, settings.sources(model)
    for name in ("source", "weights", "num_classes"):
        if getattr(settings, name):
            raise ValueError(f"expected `model` with `{name}`; without it, the embedded digits are served")
    from cafe_tta.bench.embedded import embedded_digits

    embedded = embedded_digits(say=say)
    embedded.classifier.to(choose_device(settings.device))
    return embedded.model, {"stats": embedded.stats}


def _name(model: str | Path | None) -> str:
    """A name for addresses: of the file, or of the architecture."""
    if model is None:
        return EMBEDDED
    word = Path(model).stem if os.path.exists(model) else str(model).partition(":")[2]
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in word)
