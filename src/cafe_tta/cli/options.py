"""A method's options as text: what `--set lr=0.01` means, and what every option is for."""

import ast
import inspect
import io
import math
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Union

from cafe_tta.adapter import AdapterConfig
from cafe_tta.methods import configure, method
from cafe_tta.options import did_you_mean

_NONE_WORDS = ("none", "null")
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")


@dataclass(frozen=True)
class OptionHelp:
    """An option of a method, described."""

    name: str
    kind: str
    default: Any
    meaning: str


def parse_settings(name: str, settings: Iterable[str]) -> dict[str, Any]:
    """Options of a method from texts such as `lr=0.01`, each read as its field's type says.

    >>> parse_settings("cafe", ["lr=1e-2", "memory=no", "answer=after"])
    {'lr': 0.01, 'memory': False, 'answer': 'after'}
    """
    hints = typing.get_type_hints(method(name).Config)
    options: dict[str, Any] = {}
    for setting in settings:
        option, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not option:
            raise ValueError(f"expected --set option=value, such as --set lr=0.01, but got {setting!r}")
        if option not in hints:
            known = ", ".join(hints)
            raise ValueError(f"{name} has no option {option!r}{_nearest(option, hints)}; options: {known}")
        if option in options:
            raise ValueError(f"expected every option once, but --set {option} was given twice")
        options[option] = parse_value(option, text, hints[option])
    return options


def configuration(name: str, preset: str | None, settings: Iterable[str]) -> Any:
    """A method's preset, or its defaults, with some options changed. The library checks the values."""
    return configure(name, preset, **parse_settings(name, settings))


def parse_value(option: str, text: str, hint: Any) -> Any:
    """A text as a value of a type: int, float, bool, str, a choice of words, or any of them or None.

    >>> parse_value("support_size", "none", int | None), parse_value("support_size", "20", int | None)
    (None, 20)
    """
    allowed = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(None) in allowed and text.lower() in _NONE_WORDS:
        return None
    for kind in allowed:
        try:
            return _READERS[str if typing.get_origin(kind) is Literal else kind](text)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"expected {option!r} to be {describe_type(hint)}, but got {text!r}")


def describe_type(hint: Any) -> str:
    """A type in words.

    >>> describe_type(int | None), describe_type(Literal["sgd", "adam"])
    ('a whole number or none', 'sgd or adam')
    """
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe_type(kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return _WORDS.get(hint, str(hint))


def option_help(config: type[AdapterConfig]) -> list[OptionHelp]:
    """Every option of a configuration, with the comment beside it in the source."""
    hints, comments = typing.get_type_hints(config), _comments(config)
    described = []
    for field in fields(config):
        default = field.default if field.default is not MISSING else None
        described.append(
            OptionHelp(field.name, describe_type(hints[field.name]), default, comments.get(field.name, ""))
        )
    return described


def _nearest(option: str, known: Mapping[str, Any]) -> str:
    """A hint for a typo, or for what other programs call it."""
    usual = {
        "learningrate": "lr",
        "batchsize": "batch_size",
        "optimiser": "optimizer",
        "normalization": "normalisation",
    }
    word = usual.get(re.sub("[^a-z]", "", option.lower()))
    return f"; did you mean {word!r}?" if word and word in known else did_you_mean(option, known)


def _comments(config: type[AdapterConfig]) -> dict[str, str]:
    comments: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):  # a subclass says it better
        try:
            source = textwrap.dedent(inspect.getsource(kind))
        except (OSError, TypeError):  # the package may be installed without its sources
            continue
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if text := " ".join(by_line[line] for line in lines if line in by_line):
                    comments[node.target.id] = text
    return comments


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _truth(text: str) -> bool:
    if text.lower() in _TRUE_WORDS:
        return True
    if text.lower() in _FALSE_WORDS:
        return False
    raise ValueError(text)


_READERS: dict[Any, Any] = {int: int, float: _finite, bool: _truth, str: str}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "none",
}
