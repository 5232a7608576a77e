"""Flags from declared options: a command's parameter that is an `Options` class becomes one flag for each option."""

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cafe_tta.options import Described, Options, combine, describe

C = TypeVar("C", bound=Options)
TORCHRUN = "Many processes, started by torchrun"
TimeoutOption = Annotated[
    float,
    typer.Option(
        min=1,
        help="Under torchrun, end the job when a rank sends no heartbeat for this many seconds.",
        rich_help_panel=TORCHRUN,
    ),
]
_METAVARS = {int: "NUMBER", float: "NUMBER", Path: "PATH"}


class Given(frozenset[str]):
    """The names of the options that stand on the command line."""


def command(*optional: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command for Typer whose parameters may be `Options` classes: `def adapt(model: ModelOptions, …)`.

    `optional` names required options that this command can do without. A parameter of type `Given` receives the names
    of the options that were given.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function).parameters
        groups = {name: p.annotation for name, p in parameters.items() if _is_options(p.annotation)}
        names = {name for name, p in parameters.items() if p.annotation is Given}

        def run(**arguments: Any) -> None:
            own = {name: arguments[name] for name in parameters if name not in groups and name not in names}
            given = Given(name for name, value in arguments.items() if value not in (None, []))
            own |= dict.fromkeys(names, given)
            function(**own, **{name: read(config, arguments) for name, config in groups.items()})

        expanded: list[inspect.Parameter] = []
        for name, p in ((name, p) for name, p in parameters.items() if name not in names):
            expanded += flags(groups[name], optional) if name in groups else [p.replace(kind=p.KEYWORD_ONLY)]
        return _with_signature(run, function, expanded)

    return decorate


def with_flags(config: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command for Typer that receives the flags of a class as they were given, as `**flags`; None for the rest.

    It is for a command that combines them with values from other places, such as a file.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        kept = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]

        def run(**arguments: Any) -> None:
            function(**arguments)

        return _with_signature(run, function, [*kept, *flags(config)])

    return decorate


def flags(config: type[Options], optional: Iterable[str] = ()) -> list[inspect.Parameter]:
    """A keyword parameter for each option of a class, and a hidden one for each of its aliases."""
    return [
        _parameter(described, name, described.extra.get("required", False) and name not in optional)
        for described in describe(config)
        for name in described.names
    ]


def read(config: type[C], given: Mapping[str, Any]) -> C:
    """The options that flags gave; those that were not given have their defaults. Errors name the flag.

    >>> from cafe_tta.models import ModelOptions
    >>> read(ModelOptions, {"model": "timm:resnet26", "num_classes": "10", "device": None}).num_classes
    10
    >>> read(ModelOptions, {"model": "timm:resnet26", "num_classes": "ten"})
    Traceback (most recent call last):
    ValueError: expected `num_classes` to be a whole number at least 1, or none, but got 'ten' (--num-classes)
    """
    names = {name for described in describe(config) for name in described.names}
    values = {name: value for name, value in given.items() if name in names and value is not None}
    return combine(config, ((name, _one(value, name, config), _flag(name)) for name, value in values.items()))


def _one(value: Any, name: str, config: type[Options]) -> Any:
    """The value of a flag; of a repeated one that stands for a text, the parts separated by commas."""
    described = next(described for described in describe(config) if name in described.names)
    return ",".join(value) if isinstance(value, list) and described.extra.get("repeated") else value


def _is_options(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Options)


def _with_signature(
    run: Callable[..., None], function: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(described: Described, name: str, required: bool) -> inspect.Parameter:
    kinds = typing.get_args(described.hint) or (described.hint,)
    hidden = name != described.name or described.extra.get("hidden", False)
    settings: dict[str, Any] = {
        "help": described.meaning + _default(described),
        "rich_help_panel": described.extra.get("panel"),
        "show_default": False,
        "hidden": hidden,
        "envvar": described.extra.get("envvar"),
    }
    flag, kind = _flag(name), typing.get_origin(described.hint)
    if bool in kinds:
        flag = f"{flag}/--no-{flag[2:]}"
    if name == described.name:
        flag = described.extra.get("flag", flag)
    annotation: Any = bool
    if bool not in kinds:
        settings["metavar"] = described.extra.get("metavar", _metavar(described.hint, kinds))
        annotation = list[str] if kind is list or described.extra.get("repeated") else str
    annotation = Annotated[annotation if required else annotation | None, typer.Option(flag, **settings)]
    default = inspect.Parameter.empty if required else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _metavar(hint: Any, kinds: tuple[Any, ...]) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(map(str, kinds))
    return next((_METAVARS[kind] for kind in kinds if kind in _METAVARS), "TEXT")


def _default(described: Described) -> str:
    """The default, for the end of a help text; nothing where the option is off or not given."""
    if described.default is None or described.default is False or described.default in ("", []):
        return ""
    return f" Default: {'on' if described.default is True else described.default}."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
