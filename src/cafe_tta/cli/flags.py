"""Flags from declared options: `with_flags(Settings)` gives a command one flag for each option of the class."""

import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cafe_tta.options import Described, Options, combine, describe

C = TypeVar("C", bound=Options)
_METAVARS = {int: "NUMBER", float: "NUMBER", Path: "PATH"}


def with_flags(*configs: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces `**options` in the signature of a command by a flag for each option of some classes.

    The command receives what was given: texts, lists of them for repeated flags, booleans, and None for the rest.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        kept = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [parameter for config in configs for parameter in flags(config)]

        def run(**arguments: Any) -> None:
            command(**arguments)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *added)}
        return run

    return decorate


def flags(config: type[Options]) -> list[inspect.Parameter]:
    """A keyword parameter for each option of a class, and a hidden one for each of its aliases."""
    return [
        _parameter(described, name, hidden=name != described.name or described.extra.get("hidden", False))
        for described in describe(config)
        for name in described.names
    ]


def read(config: type[C], given: Mapping[str, Any]) -> C:
    """The options that flags gave; those that were not given have their defaults. Errors name the flag.

    >>> from cafe_tta.serve import Settings
    >>> read(Settings, {"port": "80", "guard": False, "host": None}).judge
    False
    >>> read(Settings, {"port": "http"})
    Traceback (most recent call last):
    ValueError: expected `port` to be a whole number between 0 and 65535, but got 'http' (--port)
    """
    return combine(config, ((name, value, _flag(name)) for name, value in given.items() if value is not None))


def _parameter(described: Described, name: str, hidden: bool) -> inspect.Parameter:
    kinds = typing.get_args(described.hint) or (described.hint,)
    settings: dict[str, Any] = {
        "help": described.meaning + _default(described),
        "rich_help_panel": described.extra.get("panel"),
        "show_default": False,
        "hidden": hidden,
        "envvar": described.extra.get("envvar"),
    }
    flag, kind = _flag(name), typing.get_origin(described.hint)
    annotation: Any = str | None
    if bool in kinds:
        annotation, flag = bool | None, f"{flag}/--no-{flag[2:]}"
    else:
        settings["metavar"] = described.extra.get("metavar", _metavar(described.hint, kinds))
        annotation = list[str] | None if kind is list else str | None
    annotation = Annotated[annotation, typer.Option(flag, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(hint: Any, kinds: tuple[Any, ...]) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(map(str, kinds))
    return next((_METAVARS[kind] for kind in kinds if kind in _METAVARS), "TEXT")


def _default(described: Described) -> str:
    """The default, for the end of a help text; nothing where the option is off or not given."""
    if described.default is None or described.default is False or described.default == []:
        return ""
    return f" Default: {'on' if described.default is True else described.default}."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
