"""`cafe-tta methods`: what there is, and what can be set."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from cafe_tta import plugins
from cafe_tta.adapter import Adapter
from cafe_tta.cli.console import say, show_facts, show_table
from cafe_tta.methods import METHODS, method
from cafe_tta.methods.page import HEADS, capabilities, page, preset_changes, summary, told
from cafe_tta.options import describe


def methods(
    name: Annotated[
        str,
        typer.Argument(
            help="A method, or package.module:Class for one of your own: shows its options and presets.",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
    what_each_can: Annotated[
        bool, typer.Option("--capabilities", help="What each moves, costs, keeps, and learns from.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all there is to say, as a page.")] = False,
) -> None:
    """List the methods, or one method's options."""
    kinds = {name: method(name)} if name else _all()
    if markdown:
        print(page(kinds), end="")
    elif what_each_can:
        _show_capabilities(kinds)
    elif as_json:
        described = {key: _description(kind) for key, kind in kinds.items()}
        print(json.dumps(described[name] if name else described, indent=2))
    elif name:
        _show_one(name, kinds[name])
    else:
        _show_all(kinds)


def _all() -> dict[str, type[Adapter]]:
    """Every method, those of installed packages too; one that cannot be loaded is named, and left out."""
    for name in plugins.available("methods"):
        try:
            method(name)
        except (ImportError, TypeError) as error:
            say(f"note: {error}")
    return METHODS


def _show_all(kinds: Mapping[str, type[Adapter]]) -> None:
    table = Table("method", "needs", "what it does", "presets", box=None, pad_edge=False)
    for name, kind in kinds.items():
        table.add_row(name, kind.needs or "nothing", summary(kind), ", ".join(kind.presets))
    show_table(table)


def _show_capabilities(kinds: Mapping[str, type[Adapter]]) -> None:
    table = Table(*HEADS, box=None, pad_edge=False)
    for name, kind in kinds.items():
        table.add_row(*capabilities(name, kind))
    show_table(table)


def _show_one(name: str, kind: type[Adapter]) -> None:
    print(f"{told(kind)}\n")
    show_facts(list(zip(HEADS, capabilities(name, kind), strict=True)))
    print()
    table = Table("option", "default", "values", "meaning", box=None, pad_edge=False)
    for option in describe(kind.Config):
        table.add_row(option.name, str(option.default), option.allowed, option.meaning)
    show_table(table)
    print()
    table = Table("preset", "differs from the defaults in", box=None, pad_edge=False)
    for preset, changes in preset_changes(kind).items():
        table.add_row(preset, ", ".join(f"{key}={value}" for key, value in changes.items()) or "nothing")
    show_table(table)


def _description(kind: type[Adapter]) -> dict[str, Any]:
    names = ("name", "allowed", "default", "meaning")
    return {
        "name": kind.name,
        "needs": kind.needs,
        "summary": summary(kind),
        "options": [{name: getattr(option, name) for name in names} for option in describe(kind.Config)],
        "presets": preset_changes(kind),
        "traits": None if kind.traits is None else asdict(kind.traits),
    }
