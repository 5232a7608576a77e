"""The service that settings describe: its model, method and source values are loaded here, and only here by name."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cafe_tta import models, options, source
from cafe_tta.adapter import Adapter
from cafe_tta.serve.follower import Follower
from cafe_tta.serve.leader import Leader
from cafe_tta.serve.service import Service
from cafe_tta.serve.settings import Settings, of_model

EMBEDDED = "digits"


@dataclass(frozen=True)
class Built:
    """A service that has not been started, its model, and what its method was configured with."""

    service: Service
    model: models.Model
    statistics: source.SourceStats | None
    config: Any
    settings: Settings
    files: "Files"

    def is_current(self, settings: Settings) -> bool:
        """Whether these settings describe the same model, and its files have not changed since it was built."""
        same = of_model(self.settings) == of_model(named(settings)) and self.files == files_of(settings)
        return same and (settings.leader is None or settings.token == self.settings.token)  # which the leader asks for


def named(settings: Settings) -> Settings:
    """The settings, with the name that the model goes by."""
    return replace(settings, name=settings.name or _name(settings.model))


Files = list[tuple[str, int, int]]  # name, time of the last change and size


def files_of(settings: Settings) -> Files:
    """The files that a model is built from, as they are now."""
    found = []
    for path in (settings.model, settings.weights, *settings.source):
        if path is not None and os.path.isfile(path):
            known = os.stat(path)
            found.append((str(path), known.st_mtime_ns, known.st_size))
    return found


def build(settings: Settings, say: Callable[[str], None] = lambda _: None) -> Built:
    """Builds the service that the settings describe. `say` receives a line before anything that takes long."""
    config, files = settings.config(), files_of(settings)
    if settings.needs == "data":
        raise ValueError(f"{settings.method} needs labelled source images while it adapts, which a server has not")
    say(f"loading {settings.model or 'the embedded digits'}, to be adapted with {settings.method}")
    model, sources = _embedded(settings, say) if settings.model is None else _named(settings, say)
    adapter = settings.adapter(model, sources, config)
    service = _service(adapter, named(settings), sources.get("stats"))
    service.class_names = model.classes
    return Built(service, model, sources.get("stats"), config, named(settings), files)


def _service(adapter: Adapter, settings: Settings, statistics: source.SourceStats | None) -> Service:
    if settings.leader is None:
        return Service(adapter, settings, statistics)
    return Follower(adapter, settings, statistics, Leader(settings.leader, str(settings.name), settings.token))


def _named(settings: Settings, say: Callable[[str], None]) -> tuple[models.Model, dict[str, Any]]:
    names = [described.name for described in options.describe(models.ModelOptions)]
    model, sources, notes = settings.load(models.ModelOptions(**{name: getattr(settings, name) for name in names}))
    for note in notes:
        say(note)
    return model, sources


def _embedded(settings: Settings, say: Callable[[str], None]) -> tuple[models.Model, dict[str, Any]]:
    for name in ("source", "weights", "num_classes"):
        if getattr(settings, name):
            raise ValueError(f"expected `model` with `{name}`; without it, the embedded digits are served")
    from cafe_tta.bench.embedded import embedded_digits

    embedded = embedded_digits(say=say)
    embedded.classifier.to(models.choose_device(settings.device))
    return embedded.model, embedded.sources(settings.needs)


def _name(model: str | Path | None) -> str:
    """A name for addresses: of the file, or of the architecture."""
    if model is None:
        return EMBEDDED
    word = Path(model).stem if os.path.exists(model) else str(model).partition(":")[2]
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in word)
