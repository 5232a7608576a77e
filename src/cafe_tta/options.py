"""Options: each one is declared once, and its check, its documentation, its flag and its TOML key follow from that.

    @dataclass(frozen=True)
    class BrewConfig(Options):
        '''How coffee is brewed.'''

        grams: float = option(18.0, "Coffee in the basket.", above=0)
        grind: Literal["fine", "coarse"] = option("fine", "How the beans are ground.")

`BrewConfig(grams=-1)` raises, `help(BrewConfig)` lists the options, `parse(BrewConfig, {"grams": "18"})` reads text,
and `describe(BrewConfig)` is what the command line, the server's settings and the docs are made from.
"""

import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union

NONE_WORDS = ("none", "null")
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")
_RULE = "cafe_tta.option"  # where a dataclass field keeps its rule


@dataclass(frozen=True)
class _Rule:
    """What a declaration says besides type and default."""

    meaning: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def admits(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def bounds(self) -> str:
        """The bounds in words; empty where there are none."""
        if self.least is not None and self.most is not None:
            return f"between {self.least} and {self.most}"
        named = (("at least", self.least), ("above", self.above), ("below", self.below), ("at most", self.most))
        return " and ".join(f"{words} {bound}" for words, bound in named if bound is not None)


def option(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    **extra: Any,
) -> Any:
    """A field of an `Options` class: its default, what it means, and its bounds.

    `least` and `most` are inclusive, `above` and `below` exclusive. A field of type `Literal[...]` admits those words
    only; one of type `... | None` also admits None. `extra` is for whoever builds something from the declaration:

    - `panel="Network"`: the heading in `--help`. `metavar`, `flag`, `repeated`, `required`, `hidden`: of its flag.
    - `aliases=("old_name",)`: names that settings files and flags still accept.
    - `pattern=(regex, "in words")`: what a text must match.
    - `secret=True`: the value never appears in an error or a `repr`.
    - `process=True`: of the server's settings, one that belongs to its process, not to one of its models.
    """
    rule = _Rule(meaning, least, most, above, below, extra)
    shown = not extra.get("secret", False)
    if isinstance(default, (list, dict, set)):
        return field(default_factory=default.copy, metadata={_RULE: rule}, repr=shown)
    return field(default=default, metadata={_RULE: rule}, repr=shown)


class Options:
    """Base of frozen dataclasses whose fields are options: checks every value, and documents itself.

    A subclass that overrides only a default writes `lr: float = 0.1`, and keeps the meaning and the bounds.

    >>> @dataclass(frozen=True)
    ... class Brew(Options):
    ...     '''How coffee is brewed.'''
    ...     grams: float = option(18.0, "Coffee in the basket.", above=0)
    >>> Brew(grams=0)
    Traceback (most recent call last):
    ValueError: expected `grams` to be above 0, but got 0
    >>> print(Brew.__doc__)
    How coffee is brewed.
    <BLANKLINE>
    Options:
        grams: Coffee in the basket. [a number above 0; default: 18.0]
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _described: ClassVar[tuple["Described", ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hints = typing.get_type_hints(cls).items()
        cls._described = tuple(_described(cls, name, hint) for name, hint in hints if _is_option(cls, name))
        own = cls.__dict__.get("__doc__") or f"Options of {cls.__name__.removesuffix('Config')}."
        lines = [f"    {described.name}: {described.sentence()}" for described in cls._described]
        cls.__doc__ = "\n".join([own.rstrip(), "", "Options:", *lines]) if lines else own

    def __post_init__(self) -> None:
        for described in self._described:
            described.check(getattr(self, described.name))

    def changed(self) -> str:
        """The options that differ from their defaults, such as `lr=0.01, momentum=0.5`; empty where none does."""
        values = ((described, getattr(self, described.name)) for described in self._described)
        return ", ".join(f"{described.name}={value}" for described, value in values if value != described.default)


C = TypeVar("C", bound=Options)


@dataclass(frozen=True)
class Described:
    """One option, as its declaration describes it."""

    name: str
    hint: Any  # its type
    default: Any
    rule: _Rule

    @property
    def meaning(self) -> str:
        return self.rule.meaning

    @property
    def extra(self) -> Mapping[str, Any]:
        return self.rule.extra

    @property
    def allowed(self) -> str:
        """What values it takes, in words: `a number above 0, or none`."""
        alternatives = [kind for kind in _alternatives(self.hint) if kind is not type(None)]
        text = " or ".join(_words(kind) for kind in alternatives)
        if bounds := self.rule.bounds():
            text += f" {bounds}"
        return f"{text}, or none" if self.optional else text

    @property
    def optional(self) -> bool:
        return type(None) in _alternatives(self.hint)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and the older ones that it still goes by."""
        return self.name, *self.extra.get("aliases", ())

    def sentence(self) -> str:
        """Meaning, type, bounds and default, for a docstring."""
        default = "none" if self.default is None else self.default
        return f"{self.meaning} [{self.allowed}; default: {default}]"

    def check(self, value: Any) -> None:
        """Raises where the value is not of the declared type, not among the choices, or out of bounds."""
        if value is None and self.optional:
            return
        expected = self._expected(value)
        if expected:
            choices = [word for kind in _alternatives(self.hint) for word in typing.get_args(kind)]
            hint = did_you_mean(str(value), [word for word in choices if isinstance(word, str)])
            got = "" if self.extra.get("secret") else f", but got {value!r}{hint}"
            raise ValueError(f"expected `{self.name}` to be {expected}{got}")

    def _expected(self, value: Any) -> str:
        """What was expected instead of this value; empty where it is good."""
        kinds = [kind for kind in _alternatives(self.hint) if kind is not type(None)]
        or_none = " or None" if self.optional else ""
        choices = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
        if choices:
            return "" if value in choices else f"one of {', '.join(map(repr, choices))}{or_none}"
        if not any(_is_a(value, kind) for kind in kinds):
            return f"{' or '.join(map(_words, kinds))}{or_none}"
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and not self.rule.admits(float(value)):
            finite = ["finite"] if math.isinf(value) else []
            return " and ".join(filter(None, [self.rule.bounds(), *finite])) + or_none
        pattern, words = self.extra.get("pattern", (".*", ""))
        if isinstance(value, str) and not re.fullmatch(pattern, value, re.DOTALL):
            return f"{words}{or_none}"
        return ""

    def convert(self, value: Any) -> Any:
        """A value from a file or a flag in the declared type: texts are parsed, also those in lists."""
        if isinstance(value, str) and not self.extra.get("secret"):  # a secret may well be called "none"
            return self.parse(value)
        kind = next((kind for kind in _alternatives(self.hint) if typing.get_origin(kind) in (tuple, list)), None)
        if isinstance(value, list) and kind is not None:
            element = typing.get_args(kind)[0]
            if element not in (str, Path):  # numbers may be separated by commas, names may hold them
                value = [part for each in value for part in (each.split(",") if isinstance(each, str) else [each])]
            parts = [_READERS[element](part) if isinstance(part, str) else part for part in value]
            return tuple(parts) if typing.get_origin(kind) is tuple else parts
        return value

    def parse(self, text: str) -> Any:
        """The value that a text stands for: `1e-3`, `yes`, `none`, `r,g,b`."""
        if self.optional and text.lower() in NONE_WORDS:
            return None
        for kind in _alternatives(self.hint):
            try:
                return _read(text, kind)
            except (ValueError, KeyError):
                continue
        raise ValueError(f"expected `{self.name}` to be {self.allowed}, but got {text!r}")


def describe(config: type[Options]) -> tuple[Described, ...]:
    """The options of a class, in the order of their declaration."""
    return config._described


def parse(config: type[Options], texts: Mapping[str, str], owner: str = "") -> dict[str, Any]:
    """Values for the options of a class from texts, each read as its declaration says.

    >>> from cafe_tta import CAFeConfig
    >>> parse(CAFeConfig, {"lr": "1e-2", "memory": "no", "answer": "after"})
    {'lr': 0.01, 'memory': False, 'answer': 'after'}
    """
    known = {described.name: described for described in describe(config)}
    require_known(texts, known, owner or config.__name__)
    return {name: known[name].parse(text) for name, text in texts.items()}


def combine(config: type[C], *layers: Iterable[tuple[str, Any, str]]) -> C:
    """The options that layers of values make together, each of (name or alias, value, its place in words).

    A later layer wins; within a layer, the lists given to an option and its aliases add up. Texts are read as the
    declaration says. Errors name the place.

    >>> from cafe_tta import CAFeConfig
    >>> combine(CAFeConfig, [("lr", 0.1, "my.toml")], [("lr", "-1", "--lr")])
    Traceback (most recent call last):
    ValueError: expected `lr` to be at least 0, but got -1.0 (--lr)
    """
    known = {name: described for described in describe(config) for name in described.names}
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for layer in layers:
        own: dict[str, Any] = {}
        for alias, value, place in layer:
            described = known[alias]
            name = described.name
            problems.pop(name, None)
            try:
                value = described.convert(value)
                described.check(value)
            except ValueError as error:
                problems[name] = f"{error} ({place})"
            own[name] = own[name] + value if isinstance(own.get(name), list) else value
        values |= own
    if problems:
        raise ValueError("; ".join(problems.values()))
    return config(**values)


def require_known(names: Iterable[str], known: Iterable[str], owner: str, what: str = "option") -> None:
    """Refuses names that are not known, with a hint at the nearest one."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(
                f"{owner} has no {what} {name!r}{did_you_mean(name, known)}; {what}s: {', '.join(known) or 'none'}"
            )


def split_assignments(texts: Iterable[str], example: str = "lr=0.01") -> dict[str, str]:
    """Names and values of texts such as `lr=0.01`, each name at most once.

    >>> split_assignments(["lr=0.01", "answer = after"])
    {'lr': '0.01', 'answer': 'after'}
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise ValueError(f"expected option=value, such as {example}, but got {text!r}")
        if name in found:
            raise ValueError(f"expected every option once, but {name} was given twice")
        found[name] = value
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a typo, or for what other programs call an option; empty where nothing is near.

    >>> did_you_mean("learning_rate", ["lr", "momentum"]), did_you_mean("foo", ["lr"])
    ("; did you mean 'lr'?", '')
    """
    known = list(known)
    usual = {
        "learningrate": "lr",
        "batchsize": "batch_size",
        "optimiser": "optimizer",
        "normalization": "normalisation",
    }
    near = get_close_matches(word, known, n=1)
    alias = usual.get(re.sub("[^a-z]", "", word.lower()))
    if alias in known:
        near = [alias]
    return f"; did you mean {near[0]!r}?" if near else ""


def _described(config: type[Options], name: str, hint: Any) -> Described:
    """An option with the default that the class has, and the rule of the class that declared it first."""
    declared = _own_field(config, name)
    rule = next((f.metadata[_RULE] for base in config.__mro__ if _RULE in (f := _own_field(base, name)).metadata), None)
    default = declared.default
    if default is MISSING and declared.default_factory is not MISSING:
        default = declared.default_factory()
    return Described(name, hint, None if default is MISSING else default, rule or _Rule(""))


def _own_field(config: type, name: str) -> Field[Any]:
    """A field of a class, also where the `dataclass` decorator has yet to run, as in `__init_subclass__`."""
    for base in config.__mro__:
        if name in inspect.get_annotations(base):
            value = base.__dict__.get("__dataclass_fields__", {}).get(name, base.__dict__.get(name, MISSING))
            return value if isinstance(value, Field) else field(default=value)
    return field()


def _is_option(config: type[Options], name: str) -> bool:
    return any(_RULE in _own_field(base, name).metadata for base in config.__mro__)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_a(value: Any, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real)
    if kind is Path:
        return isinstance(value, (str, Path))
    origin = typing.get_origin(kind) or kind
    return not isinstance(origin, type) or isinstance(value, origin)


def _words(kind: Any) -> str:
    """A type in words.

    >>> _words(int), _words(Literal["sgd", "adam"]), _words(tuple[float, float, float])
    ('a whole number', 'sgd or adam', 'a list of numbers, such as 0.5,0.5,0.5')
    """
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (tuple, list):
        numeric = typing.get_args(kind)[0] is float
        return "a list of numbers, such as 0.5,0.5,0.5" if numeric else "a list, such as a,b"
    return _WORDS.get(typing.get_origin(kind) or kind, str(kind))


def _read(text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return text
    if typing.get_origin(kind) in (tuple, list):
        return typing.get_origin(kind)(_READERS[typing.get_args(kind)[0]](part.strip()) for part in text.split(","))
    return _READERS[kind](text)


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


_READERS: dict[Any, Any] = {int: int, float: _finite, bool: _truth, str: str, Path: Path}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    dict: "a table of names and values",
}
