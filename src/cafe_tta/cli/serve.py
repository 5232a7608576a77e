"""`cafe-tta serve`: the model as a server that adapts while it answers."""

import inspect
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from cafe_tta.cli import inputs
from cafe_tta.cli.console import say, show_facts
from cafe_tta.methods import method as method_named
from cafe_tta.methods.choice import MethodOptions
from cafe_tta.source.histograms import SourceHistograms
from cafe_tta.source.stats import SourceStats
from cafe_tta.source.swag import Posterior

if TYPE_CHECKING:
    from cafe_tta.serve.protocol import Signature
    from cafe_tta.serve.service import Service
    from cafe_tta.serve.settings import Settings

EMBEDDED = "digits"


def _serve(config: Path | None, check: bool, **flags: Any) -> None:
    """Serve a model that adapts to the images it is shown. Without options: the embedded digits model.

    Speaks the Open Inference Protocol (v2) with binary tensors, as Triton does; has a page with all that happens at its address.

    Every option may also stand in a TOML file (max_batch_size = 64) and in the environment (CAFE_TTA_SERVE_MAX_BATCH_SIZE=64). Flags win over the environment, the environment over the file.
    """  # noqa: E501 - a line break here would be one in the help
    from cafe_tta.serve import server
    from cafe_tta.serve.app import App
    from cafe_tta.serve.settings import load_settings

    settings = load_settings(flags, config)
    if check:
        # Without its folder of states: a running server may hold that.
        _check(*build(settings.model_copy(update={"state": None})), settings)
        return
    bound = server.bind(settings.host, settings.port)
    try:
        service, signature, _ = build(settings)
        server.start_logging(settings.log_level)
        service.start()
        if settings.host not in ("127.0.0.1", "localhost", "::1") and settings.token is None:
            say("warning: anybody who reaches this address may pause and reset the model; a token prevents it")
        try:
            server.run(lambda: App(service, signature, settings), bound, say)
        finally:
            service.close()
    finally:
        bound.close()


def build(settings: "Settings") -> "tuple[Service, Signature, list[tuple[str, str]]]":
    """The service that the settings describe, how it is asked, and what is worth telling about it."""
    from cafe_tta.serve.protocol import Signature
    from cafe_tta.serve.service import Service

    kind = method_named(settings.method)
    config = MethodOptions(settings.method, settings.preset, settings.set).config()
    paths = {"stats": settings.stats, "histograms": settings.histograms, "posterior": settings.posterior}
    chosen, statistics = _model(settings)
    source: Any = None
    if kind.needs == "data":
        raise ValueError(f"{settings.method} needs labelled source images while it adapts, which a server has not")
    if kind.needs == "stats":
        if statistics is None:
            raise ValueError(
                f"{settings.method} needs --stats FILE; "
                "make them with: cafe-tta stats --model … --data SOURCE --output FILE"
            )
        source = statistics
    elif kind.needs is not None:
        if paths[kind.needs] is None:
            raise ValueError(f"{settings.method} needs --{kind.needs} FILE; see cafe-tta methods")
        source = (SourceHistograms if kind.needs == "histograms" else Posterior).load(str(paths[kind.needs]))
    name = settings.name or _name(settings.model)
    service = Service(kind(chosen.classifier, source, config), settings.service_config(name), statistics)
    service.class_names = chosen.classes
    signature = Signature(
        name,
        chosen.classifier.num_classes,
        chosen.preprocessing,
        chosen.classes,
        max_images=settings.max_batch_size,
        max_json_bytes=min(settings.max_json_bytes, settings.max_body_bytes),
        device=chosen.classifier.head.weight.device,
    )
    if settings.max_body_bytes + settings.max_batch_size * signature.image_bytes > settings.max_pending_bytes:
        raise ValueError(
            f"one request of max_batch_size = {settings.max_batch_size} images of this model takes more memory than "
            f"max_pending_bytes = {settings.max_pending_bytes} allows; lower the one or raise the other"
        )
    facts = [
        ("model", f"{name} ({chosen.architecture}), {signature.num_classes} classes, {signature.preprocessing}"),
        ("method", f"{settings.method}, {config}"),
        ("statistics", "none: drift is not told" if statistics is None else f"{len(statistics.groups)} groups"),
    ]
    return service, signature, facts


def _model(settings: "Settings") -> tuple[inputs.Model, SourceStats | None]:
    if settings.model is None:
        given = [name for name in ("weights", "stats", "num_classes") if getattr(settings, name) is not None]
        if given:
            raise ValueError(f"expected --model with --{given[0].replace('_', '-')}; without it, digits are served")
        from cafe_tta.cli.embedded import embedded_digits

        embedded = embedded_digits(say=say)
        embedded.classifier.to(inputs.choose_device(settings.device))
        return embedded.model, embedded.stats
    chosen = inputs.load_model(
        settings.model,
        weights=settings.weights,
        num_classes=settings.num_classes,
        pretrained=settings.pretrained,
        image_size=settings.image_size,
        mean=settings.mean,
        std=settings.std,
        head=settings.head,
        device=settings.device,
    )
    statistics = None if settings.stats is None else SourceStats.load(settings.stats)
    if statistics is not None:
        statistics.check_belongs_to(chosen.classifier)
    return chosen, statistics


def _name(model: str | None) -> str:
    """A name for addresses: of the file, or of the architecture."""
    if model is None:
        return EMBEDDED
    word = Path(model).stem if os.path.exists(model) else model.partition(":")[2]
    return "".join(letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "-" for letter in word)


def _check(service: "Service", signature: "Signature", facts: list[tuple[str, str]], settings: "Settings") -> None:
    """Answers one image, and tells what would be served."""
    size = signature.preprocessing.size
    image = signature.preprocessing(np.full((1, size, size, 3), 128, np.uint8))
    logits = service.probe(image.to(signature.device))
    if not torch.isfinite(logits).all():
        raise ValueError("the model's answer to a grey image is not finite; are these the right weights?")
    show_facts([
        *facts,
        ("state", "not kept" if settings.state is None else f"kept in {settings.state}"),
        ("address", f"http://{settings.host}:{settings.port}/v2/models/{signature.name}"),
        ("token", "needed to pause, resume, reset, roll back and save" if settings.token else "none"),
        ("check", "one image was answered; all is well"),
    ])  # fmt: skip


def _flags() -> dict[str, inspect.Parameter]:
    """One flag for each setting. Their values are texts here: the settings check them, wherever they come from."""
    from cafe_tta.serve.settings import Settings

    flags = {}
    for name, field in Settings.model_fields.items():
        extra: Any = field.json_schema_extra
        flag, kinds = f"--{name.replace('_', '-')}", typing.get_args(field.annotation) or (field.annotation,)
        shown = field.get_default(call_default_factory=True)
        default = "" if shown in (None, []) or shown is False else f" Default: {_as_flag(shown)}."
        options: dict[str, Any] = {"help": f"{field.description}{default}", "rich_help_panel": extra["panel"]}
        options["show_default"] = False
        kind: Any = str | None
        if bool in kinds:
            kind = bool | None
            flag = f"{flag}/--no-{flag[2:]}"
        elif name == "set":
            kind = list[str] | None
            options["metavar"] = "OPTION=VALUE"
        else:
            words = {int: "NUMBER", float: "NUMBER", Path: "PATH"}
            options["metavar"] = next((words[k] for k in kinds if k in words), "TEXT")
        annotation = Annotated[kind, typer.Option(flag, **options)]
        flags[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return flags


def _as_flag(value: Any) -> str:
    return "on" if value is True else str(value)


def _command() -> Callable[..., None]:
    """The command with its flags spelt out, as Typer wants them."""
    own = {
        "config": Annotated[Path | None, typer.Option(help="TOML file of settings.", show_default=False)],
        "check": Annotated[
            bool, typer.Option("--check", help="Check the settings, load the model, answer one image; do not listen.")
        ],
    }
    defaults = {"config": None, "check": False}

    def serve(**options: Any) -> None:
        _serve(**options)

    try:
        flags = _flags()
    except ModuleNotFoundError as error:
        lacking = error

        def without() -> None:
            """Serve a model that adapts to the images it is shown. Needs: pip install "cafe-tta[serve]"."""
            raise ImportError(f'the server needs {lacking.name}; install it with: pip install "cafe-tta[serve]"')

        without.__name__ = "serve"
        return without
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(n, keyword, default=defaults[n], annotation=kind) for n, kind in own.items()]
    parameters += flags.values()
    serve.__doc__ = _serve.__doc__
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


serve = _command()
