"""Options are declared once; checks, documentation and parsing follow from the declaration."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

import cafe_tta as cafe
from cafe_tta.options import Options, describe, option, parse, split_assignments


@dataclass(frozen=True)
class Brew(Options):
    """How coffee is brewed."""

    grams: float = option(18.0, "Coffee in the basket.", above=0, most=30)
    shots: int = option(2, "Shots to pull.", least=1)
    grind: Literal["fine", "coarse"] = option("fine", "How the beans are ground.")
    timer: float | None = option(None, "Seconds until it stops.", least=1)
    crema: bool = option(True, "Whether there is crema.")
    log: Path | None = option(None, "File of notes.", panel="Notes")
    beans: list[str] = option([], "Names of the beans.")


@dataclass(frozen=True)
class Lungo(Brew):
    """A longer one."""

    shots: int = 1  # only the default differs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grams": 0}, "expected `grams` to be above 0 and at most 30, but got 0"),
        ({"grams": 31.0}, "expected `grams` to be above 0 and at most 30, but got 31.0"),
        ({"grams": float("nan")}, "expected `grams` to be above 0 and at most 30, but got nan"),
        ({"grams": "18"}, "expected `grams` to be a number, but got '18'"),
        ({"shots": 2.5}, "expected `shots` to be a whole number, but got 2.5"),
        ({"shots": True}, "expected `shots` to be a whole number, but got True"),
        ({"grind": "medium"}, "expected `grind` to be one of 'fine', 'coarse', but got 'medium'"),
        ({"timer": 0.5}, "expected `timer` to be at least 1 or None, but got 0.5"),
        ({"crema": 1}, "expected `crema` to be true or false, but got 1"),
        ({"shots": None}, "expected `shots` to be a whole number, but got None"),
    ],
)
@pytest.mark.parametrize("kind", [Brew, Lungo])
def test_a_bad_value_is_refused_by_its_declaration(kind, values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        kind(**values)


def test_good_values_are_taken_as_they_are():
    made = Brew(grams=20, timer=None, log="notes.txt", beans=["a"])
    assert (made.grams, made.timer, made.log, made.beans) == (20, None, "notes.txt", ["a"])
    assert Lungo() == Lungo(shots=1) and Brew().shots == 2


def test_the_declaration_is_the_documentation():
    lines = Lungo.__doc__.splitlines()
    assert lines[0] == "A longer one."
    assert "    shots: Shots to pull. [a whole number at least 1; default: 1]" in lines
    assert "    grind: How the beans are ground. [fine or coarse; default: fine]" in lines
    assert "    timer: Seconds until it stops. [a number at least 1, or none; default: none]" in lines
    assert [described.name for described in describe(Lungo)] == list(Brew.__dataclass_fields__)
    assert next(d for d in describe(Brew) if d.name == "log").extra == {"panel": "Notes"}


def test_texts_are_parsed_as_declared():
    texts = {"grams": "17.5", "timer": "none", "crema": "off", "log": "a/b", "beans": "x, y", "grind": "coarse"}
    values = (17.5, None, False, Path("a/b"), ["x", "y"], "coarse")
    assert parse(Brew, texts) == dict(zip(texts, values, strict=True))
    with pytest.raises(ValueError, match="expected `shots` to be a whole number at least 1, but got 'two'"):
        parse(Brew, {"shots": "two"})
    with pytest.raises(ValueError, match="Brew has no option 'shot'; did you mean 'shots'"):
        parse(Brew, {"shot": "2"})
    with pytest.raises(ValueError, match="expected option=value, such as lr=0.01, but got 'lr'"):
        split_assignments(["lr"])
    with pytest.raises(ValueError, match="expected every option once, but lr was given twice"):
        split_assignments(["lr=1", "lr=2"])


@pytest.mark.parametrize("name", cafe.METHODS)
def test_every_option_of_every_method_has_a_meaning(name):
    """A whole sentence, in the docstring that `help()` shows."""
    config = cafe.METHODS[name].Config
    for described in describe(config):
        assert described.meaning[:1].isupper() or described.meaning[0] in "ετλβρα"
        assert described.meaning.endswith(".") and described.meaning in config.__doc__
    assert {described.name for described in describe(config)} == set(config.__dataclass_fields__)


def test_options_are_keywords_of_every_method(source, source_without_batchnorm):
    for name, kind in cafe.METHODS.items():
        made = source_without_batchnorm if name == "moetta" else source
        adapter = kind(made.classifier, made.needs[kind.needs], batch_size=7)
        assert adapter.config == replace(kind.Config(), batch_size=7), name
    needs = source.needs["stats"]
    assert cafe.CAFe(source.classifier, needs, lr=1e-4, memory=False).config == cafe.CAFeConfig(lr=1e-4, memory=False)
    config = cafe.CAFeConfig(lr=1, every=2)
    assert cafe.CAFe(source.classifier, needs, config, lr=3).config == cafe.CAFeConfig(lr=3, every=2)
    for make in (lambda **options: cafe.CAFe(source.classifier, needs, **options),
                 lambda **options: cafe.create("cafe", source.classifier, needs, **options)):  # fmt: skip
        with pytest.raises(ValueError, match="cafe has no option 'learning_rate'; did you mean 'lr'"):
            make(learning_rate=1e-4)
        with pytest.raises(ValueError, match="expected `lr` to be a number, but got '0.1'"):
            make(lr="0.1")
        with pytest.raises(ValueError, match="expected `lr` to be at least 0, but got -1"):
            make(lr=-1)
