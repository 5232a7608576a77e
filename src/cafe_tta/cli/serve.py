"""`cafe-tta serve`: the model as a server that adapts while it answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from cafe_tta._install import missing
from cafe_tta.cli.console import say, show_facts
from cafe_tta.cli.flags import with_flags
from cafe_tta.serve import Built, Settings, build, load_models


@with_flags(Settings)
def serve(
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings, such as max_batch_size = 64.", show_default=False)
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check settings and saved state, load every model, answer one image, and stop."),
    ] = False,
    **flags: Any,
) -> None:
    """Serve a model that adapts to the images it is shown. Without options: the embedded digits model.

    The server speaks the Open Inference Protocol (v2) with binary tensors, as Triton does, and shows a dashboard at its address.

    Every option can also be set in a TOML file (max_batch_size = 64) or in the environment (CAFE_TTA_SERVE_MAX_BATCH_SIZE=64). Flags win over the environment, the environment over the file.

    A file with tables [models.NAME] serves several models, each with its own settings in its table.
    """  # noqa: E501 - a line break here would be one in the help
    models = load_models(flags, config)
    process = models[0]  # for what belongs to the server: the same for all models
    try:
        from cafe_tta.serve.http import server
        from cafe_tta.serve.http.app import App, Reloader
    except ModuleNotFoundError as error:
        raise missing("the server", error, "serve") from None
    if process.grpc_port is not None:
        try:
            from cafe_tta.serve.http import rpc  # noqa: F401 - before the model is loaded
        except ModuleNotFoundError as error:
            raise missing("gRPC", error, "grpc") from None
    if check:
        # Without opening its folder of states, which a running server may have locked.
        built = [_built(replace(settings, state=None), say, len(models)) for settings in models]
        App(built)
        for settings, each in zip(models, built, strict=True):
            _check(each, settings)
        return
    server.start_logging(process.log_level, process.log_format)
    tell = server.log_line if process.log_format == "json" else say  # nothing but JSON on stderr
    if process.grpc_port is not None:  # in use? Better known before the model loads
        server.bind(process.host, process.grpc_port, "grpc_port").close()
    bound = server.bind(process.host, process.port)
    try:
        reloader = Reloader(lambda: load_models(flags, config), lambda settings: build(settings, tell))
        app = App([_built(settings, tell, len(models)) for settings in models], reloader)
        for inference in app.models.values():
            with _naming(inference.service.name, len(models)):
                inference.service.start()
        if process.host not in ("127.0.0.1", "localhost", "::1") and process.token is None:
            tell("warning: everyone who reaches this address can pause and reset the model; set a token to prevent it")
        try:
            server.run(app, bound, tell)
        finally:
            app.close()
    finally:
        bound.close()


def _built(settings: Settings, tell: Callable[[str], None], models: int) -> Built:
    with _naming(settings.name, models):
        return build(settings, tell)


@contextmanager
def _naming(name: str | None, models: int) -> Iterator[None]:
    """Says in errors which of several models they are about."""
    try:
        yield
    except (ValueError, OSError) as error:
        if models == 1:
            raise
        raise ValueError(f"the model {name!r} cannot be served: {error}") from error


def _check(built: Built, settings: Settings) -> None:
    """Answers one image, and shows what would be served."""
    name = built.service.name
    preprocessing, statistics = built.model.preprocessing, built.statistics
    image = preprocessing(np.full((1, preprocessing.size, preprocessing.size, 3), 128, np.uint8))
    logits = built.service.probe(image.to(built.service.device))
    if not torch.isfinite(logits).all():
        raise ValueError("the model's answer to a grey image is not finite; are these the right weights?")
    classes = f"{built.service.num_classes} classes"
    state = "not kept" if settings.state is None else f"{settings.state}: {built.service.check_state(settings.state)}"
    show_facts([
        ("model", f"{name} ({built.model.architecture}), {classes}"),
        ("images", f"are read at {preprocessing.describe()}"),
        ("method", f"{settings.method}, {built.config.changed() or 'all options at their defaults'}"),
        ("statistics", "none: drift is unknown" if statistics is None else f"{len(statistics.groups)} groups"),
        ("state", state),
        ("address", f"http://{settings.host}:{settings.port}/v2/models/{name}"),
        ("leader", settings.leader or "none: adapts by itself"),
        ("token", "needed to pause, resume, reset, roll back and save" if settings.token else "none"),
        ("check", "one image was answered; all is well"),
    ])  # fmt: skip
