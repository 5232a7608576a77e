"""The public API: every class and function is documented with an example that the doctests run."""

import inspect
from dataclasses import is_dataclass

import pytest

import cafe_tta as cafe
from cafe_tta.cli.app import app
from cafe_tta.options import Options

PUBLIC = {name: value for name, value in vars(cafe).items() if inspect.isclass(value) or inspect.isfunction(value)}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_that_runs(name):
    """The doctests of `make test` execute it."""
    own = inspect.cleandoc(vars(PUBLIC[name]).get("__doc__") or "") if inspect.isclass(PUBLIC[name]) else None
    assert ">>>" in (own if own is not None else PUBLIC[name].__doc__ or ""), f"cafe_tta.{name} has no example"


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isclass(value)])
def test_every_method_of_a_public_class_says_what_it_does(name):
    members = inspect.getmembers(PUBLIC[name], inspect.isroutine)
    own = {key: value for key, value in members if (getattr(value, "__module__", None) or "").startswith("cafe_tta")}
    assert [key for key, value in own.items() if not key.startswith("_") and not inspect.getdoc(value)] == []


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if name.endswith("Config")])
def test_help_of_a_config_lists_its_options(name):
    config = PUBLIC[name]
    assert is_dataclass(config) and issubclass(config, Options)
    shown = inspect.getdoc(config)
    assert all(f"{field}: " in shown for field in config.__dataclass_fields__)


def test_commands_are_thin():
    """Command functions of at most 60 lines: what they do is library code."""
    for command in app.registered_commands:
        function = inspect.getclosurevars(command.callback).nonlocals.get("function", command.callback)
        lines = len(inspect.getsource(function).splitlines())
        assert lines <= 60, f"`cafe-tta {command.name}` has {lines} lines"
