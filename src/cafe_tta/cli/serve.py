"""`cafe-tta serve`: the model as a server that adapts while it answers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from cafe_tta._install import missing
from cafe_tta.cli.console import say, show_facts
from cafe_tta.cli.flags import with_flags
from cafe_tta.models import Preprocessing
from cafe_tta.serve import Built, Service, Settings, build, load_settings


@with_flags(Settings)
def serve(
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings, such as max_batch_size = 64.", show_default=False)
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check settings and saved state, load the model, answer one image, and stop."),
    ] = False,
    **flags: Any,
) -> None:
    """Serve a model that adapts to the images it is shown. Without options: the embedded digits model.

    The server speaks the Open Inference Protocol (v2) with binary tensors, as Triton does, and shows a dashboard at its address.

    Every option can also be set in a TOML file (max_batch_size = 64) or in the environment (CAFE_TTA_SERVE_MAX_BATCH_SIZE=64). Flags win over the environment, the environment over the file.
    """  # noqa: E501 - a line break here would be one in the help
    settings = load_settings(flags, config)
    try:
        from cafe_tta.serve.http import server
        from cafe_tta.serve.http.app import App
    except ModuleNotFoundError as error:
        raise missing("the server", error, "serve") from None
    if settings.grpc_port is not None:
        try:
            from cafe_tta.serve.http import rpc  # noqa: F401 - before the model is loaded
        except ModuleNotFoundError as error:
            raise missing("gRPC", error, "grpc") from None
    if check:
        # Without opening its folder of states, which a running server may have locked.
        built = build(replace(settings, state=None), say)
        _check(built, App(built.service, built.model.preprocessing).signature.name, settings)
        return
    server.start_logging(settings.log_level, settings.log_format)
    tell = server.log_line if settings.log_format == "json" else say  # nothing but JSON on stderr
    if settings.grpc_port is not None:
        server.bind(
            settings.host, settings.grpc_port, "grpc_port"
        ).close()  # in use? Better known before the model loads
    bound = server.bind(settings.host, settings.port)
    try:
        built = build(settings, tell)
        app = App(built.service, built.model.preprocessing, lambda: _next(flags, config, tell))
        built.service.start()
        if settings.host not in ("127.0.0.1", "localhost", "::1") and settings.token is None:
            tell("warning: everyone who reaches this address can pause and reset the model; set a token to prevent it")
        try:
            server.run(app, bound, tell)
        finally:
            app.service.close()
    finally:
        bound.close()


def _next(flags: dict[str, Any], config: Path | None, tell: Callable[[str], None]) -> tuple[Service, Preprocessing]:
    """The service of the settings as they are now: the file and the environment may have changed since the start."""
    built = build(load_settings(flags, config), tell)
    return built.service, built.model.preprocessing


def _method(settings: Settings) -> str:
    """The method, and the options that are not its defaults."""
    preset = [] if settings.preset is None else [f"preset {settings.preset}"]
    return ", ".join([settings.method, *preset, *settings.set]) + ("" if settings.adapt else " (off: adapt=no)")


def _check(built: Built, name: str, settings: Settings) -> None:
    """Answers one image, and shows what would be served."""
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
        ("method", _method(settings)),
        ("statistics", "none: drift is unknown" if statistics is None else f"{len(statistics.groups)} groups"),
        ("state", state),
        ("address", f"http://{settings.host}:{settings.port}/v2/models/{name}"),
        ("token", "needed to pause, resume, reset, roll back and save" if settings.token else "none"),
        ("check", "one image was answered; all is well"),
    ])  # fmt: skip
