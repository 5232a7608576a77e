"""A hook of mkdocs: the reference, made from the code.

`::: cafe_tta.CAFe` on a page becomes the signature, the docstring, the options and the public methods of that object;
`::: cafe-tta adapt` becomes the help of that command. A name that does not exist stops the build.
"""

import inspect
import pydoc
import re
from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from cafe_tta.cli import app
from cafe_tta.options import Options, describe

DIRECTIVE = re.compile(r"^::: (cafe-tta )?(\S+)$", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
WIDTH = 100


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return DIRECTIVE.sub(lambda match: command(match[2]) if match[1] else documented(match[2]), markdown)


def documented(path: str) -> str:
    """The section of a class, a function or a module's dictionary."""
    target = pydoc.locate(path)
    if target is None:
        raise ValueError(f"expected the name of an object, but nothing is called {path}")
    parts = [f"### {path.removeprefix('cafe_tta.')} {{ #{path} }}"]
    if callable(target):
        parts += [signature(path, target), prose(target)]
    if inspect.isclass(target):
        parts += [option_table(target), *members(path, target)]
    return "\n\n".join(part for part in parts if part)


def signature(path: str, target: Any) -> str:
    """The call, with one parameter a line where it is long. Classes whose constructor is not theirs have none."""
    keyword = "class " if inspect.isclass(target) else ""
    if inspect.isclass(target) and (issubclass(target, (Options, Exception))):
        return f"```python\n{keyword}{path}\n```"
    shown = inspect.signature(target)
    parameters = [re.sub(r"<[\w.]+ object at \w+>|<factory>", "…", str(p)) for p in shown.parameters.values()]
    parameters = [without_modules(text) for text in parameters if text != "self"]
    returned = "" if inspect.isclass(target) or shown.return_annotation is shown.empty else shown.return_annotation
    result = f" -> {without_modules(inspect.formatannotation(returned))}" if returned != "" else ""
    line = f"{keyword}{path}({', '.join(parameters)}){result}"
    if len(line) > WIDTH:
        line = f"{keyword}{path}(\n    " + ",\n    ".join(parameters) + f",\n){result}"
    return f"```python\n{line}\n```"


def without_modules(text: str) -> str:
    """An annotation by its last name: `torch.Tensor` is `Tensor`."""
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)


def prose(target: Any) -> str:
    """The docstring; examples are blocks of code, and the list of options is left to the table."""
    text = inspect.getdoc(target) or ""
    if inspect.isclass(target) and issubclass(target, Options):
        text = text.partition("\nOptions:\n")[0]
    return EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)


def option_table(target: type) -> str:
    """The options that a class adds to those of its base, or whose default it changes."""
    if not issubclass(target, Options) or target is Options:
        return ""
    base = next((base for base in target.__mro__[1:] if issubclass(base, Options)), Options)
    known = {option.name: option.default for option in describe(base)}
    own = [o for o in describe(target) if o.name not in known or o.default != known[o.name]]
    inherited = f"Also the options of `{base.__name__}`." if known else ""
    if not own:
        return inherited
    rows = [f"| `{o.name}` | {cell(o.meaning)} | {cell(o.allowed)} | {default_cell(o.default)} |" for o in own]
    return "\n".join(["| option | meaning | values | default |", "|---|---|---|---|", *rows]) + f"\n\n{inherited}"


def default_cell(default: Any) -> str:
    return "none" if default in (None, "", (), []) else f"`{default}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def members(path: str, target: type) -> Iterator[str]:
    """The public methods and properties that the class itself defines and documents."""
    for name, member in vars(target).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        is_property = isinstance(member, property)
        shown = f"```python\n{name}\n```" if is_property else signature(name, getattr(target, name))
        yield f"#### {name} {{ #{path}.{name} }}\n\n{shown}\n\n{prose(function)}"


def command(name: str) -> str:
    """The section of a command: its help and its flags."""
    group: Any = typer.main.get_command(app)
    target = group.commands[name]
    rows = [flag_row(parameter) for parameter in target.params if not getattr(parameter, "hidden", False)]
    table = "\n".join(["| flag | meaning |", "|---|---|", *rows])
    help_text = inspect.cleandoc(target.help or "").replace("\b\n", "").replace("\b", "")
    return f"## cafe-tta {name} {{ #{name} }}\n\n{commands_in_blocks(help_text)}\n\n{table}"


def commands_in_blocks(text: str) -> str:
    """Lines of a help text that are commands, as blocks."""
    return re.sub(
        r"^ *(cafe-tta .*(?:\n {8,}.*)*)",
        lambda m: f"\n    {m[1].replace(chr(10), chr(10) + '    ')}\n",
        text,
        flags=re.M,
    )


def flag_row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else [parameter.name]
    required = "" if not parameter.required else " Required."
    return f"| {', '.join(f'`{name}`' for name in names)} | {cell(getattr(parameter, 'help', '') or '')}{required} |"
