"""Flags from declared options: a command's parameter that is an `Options` class becomes one flag for each option."""

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cafe_tta.options import Described, Options, describe

O = TypeVar("O", bound=Options)  # noqa: E741 - options
_METAVARS = {int: "NUMBER", float: "NUMBER", Path: "PATH"}


def command(*optional: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command for Typer whose parameters may be `Options` classes: `def adapt(model: ModelOptions, …)`.

    `optional` names required options that this command can do without.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function).parameters
        groups = {name: p.annotation for name, p in parameters.items() if _is_options(p.annotation)}

        def run(**arguments: Any) -> None:
            own = {name: arguments[name] for name in parameters if name not in groups}
            function(**own, **{name: read(config, arguments) for name, config in groups.items()})

        expanded: list[inspect.Parameter] = []
        for name, p in parameters.items():
            expanded += flags(groups[name], optional) if name in groups else [p.replace(kind=p.KEYWORD_ONLY)]
        return _with_signature(run, function, expanded)

    return decorate


def with_flags(*configs: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces `**options` in the signature of a command by a flag for each option of some classes.

    The command receives what was given: texts, lists of them for repeated flags, booleans, and None for the rest.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        kept = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]

        def run(**arguments: Any) -> None:
            function(**arguments)

        return _with_signature(run, function, [*kept, *(p for config in configs for p in flags(config))])

    return decorate


def flags(config: type[Options], optional: Iterable[str] = ()) -> list[inspect.Parameter]:
    """A keyword parameter for each option of a class, and a hidden one for each of its aliases."""
    return [
        _parameter(described, name, described.extra.get("required", False) and name not in optional)
        for described in describe(config)
        for name in (described.name, *described.extra.get("aliases", ()))
    ]


def read(config: type[O], given: Mapping[str, Any]) -> O:
    """The options that flags gave; those that were not given have their defaults. Errors name the flag.

    Aliases of a list add to it.

    >>> from cafe_tta.models import ModelOptions
    >>> read(ModelOptions, {"model": "timm:resnet26", "num_classes": "10", "device": None}).num_classes
    10
    >>> read(ModelOptions, {"model": "timm:resnet26", "num_classes": "ten"})
    Traceback (most recent call last):
    ValueError: expected `num_classes` to be a whole number at least 1, or none, but got 'ten' (--num-classes)
    """
    values: dict[str, Any] = {}
    for described in describe(config):
        for name in (*described.extra.get("aliases", ()), described.name):
            value = given.get(name)
            if value is None:
                continue
            try:
                value = described.parse(value) if isinstance(value, str) else value
                described.check(value)
            except ValueError as error:
                raise ValueError(f"{error} ({_flag(name)})") from None
            values[described.name] = values.get(described.name, []) + value if isinstance(value, list) else value
    return config(**values)


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
    hidden = name != described.name
    settings: dict[str, Any] = {
        "help": described.meaning + _default(described),
        "rich_help_panel": described.extra.get("panel"),
        "show_default": False,
        "hidden": hidden,
        "envvar": described.extra.get("envvar"),
    }
    flag = _flag(name)
    repeated = typing.get_origin(described.hint) is list
    annotation: Any = str
    if bool in kinds:
        own = described.extra.get("flag")
        annotation, flag = bool, own or f"{flag}/--no-{flag[2:]}"
    else:
        usual = next((_METAVARS[kind] for kind in kinds if kind in _METAVARS), "TEXT")
        settings["metavar"] = described.extra.get("metavar", usual)
        annotation = list[str] if repeated else str
    annotation = Annotated[annotation if required else annotation | None, typer.Option(flag, **settings)]
    default = inspect.Parameter.empty if required else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(described: Described) -> str:
    """The default, for the end of a help text; nothing where the option is off or not given."""
    if described.default in (None, False, "", []):
        return ""
    return f" Default: {'on' if described.default is True else described.default}."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
