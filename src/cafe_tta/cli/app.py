"""The command `cafe-tta`: its commands, and what becomes of errors."""

import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import rich_utils
from typer.core import TyperGroup

import cafe_tta
from cafe_tta.cli.adapt import adapt
from cafe_tta.cli.bench import bench
from cafe_tta.cli.console import only_rank_0_prints, said_warnings, say, say_error
from cafe_tta.cli.corrupt import corrupt
from cafe_tta.cli.demo import demo
from cafe_tta.cli.methods import methods
from cafe_tta.cli.monitor import monitor
from cafe_tta.cli.report import report
from cafe_tta.cli.serve import serve
from cafe_tta.cli.simulate import simulate
from cafe_tta.cli.stats import stats
from cafe_tta.cli.train import train
from cafe_tta.distributed import Share, torchrun_share

# What a user can put right: one line, no traceback. storage.StorageError is a ValueError; RuntimeError is for moments,
# such as a download that fails or a device without memory left.
EXPECTED = (ValueError, TypeError, OSError, ImportError, RuntimeError)
SHARED = ("stats", "bench")  # commands that share their work out to the ranks of torchrun
PREDICT = ("predict", "classify", "infer")  # what other tools call `adapt`
# Typer shows only BadParameter of its family; the others (a missing option, an unknown command) are its ancestors.
UsageError: Any = typer.BadParameter.__mro__[1]


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            with only_rank_0_prints(), said_warnings():
                return super().invoke(ctx)
        except (
            typer.Exit,
            typer.Abort,
            BrokenPipeError,
        ):  # `cafe-tta methods | head` breaks a pipe: Typer ends quietly
            raise
        except KeyboardInterrupt as error:
            if not (torchrun_share() or Share()).rank:
                say(f"interrupted{f': {error}' if str(error) else ''}")
            raise typer.Exit(getattr(error, "exit_code", 130)) from None
        except EXPECTED as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            say_error(describe(error))
            raise typer.Exit(2) from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        name = prog_name or "cafe-tta"
        try:
            # Not on its own feet, or Typer would print its own errors, in boxes.
            code = super().main(args, name, complete_var, False, windows_expand_args, **extra)
        except UsageError as error:
            command_path = getattr(getattr(error, "ctx", None), "command_path", "cafe-tta")
            say(f"error: {error.format_message().rstrip('.')}{_hint(error)}; see {command_path} --help")
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


def _hint(error: Any) -> str:
    """What was meant by a wrong command line, where that can be told."""
    message = error.format_message()
    if any(f"No such command '{word}'" in message for word in PREDICT):
        return "; cafe-tta adapt classifies images, with --method source as the model is"
    if "extra argument" in message and any(Path(word.lstrip("(").rstrip(").")).is_file() for word in message.split()):
        return "; put a pattern in quotes: --data 'photos/*.jpg'"  # the shell makes a list of files of it
    return ""


def describe(error: Exception) -> str:
    """What went wrong, for one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _folding(highlight: Any) -> Any:
    """A highlighter of option names that continues a long one on the next line, where Typer would cut it off."""

    def fold(text: Any) -> Any:
        shown = highlight(text)
        shown.overflow = "fold"
        return shown

    return fold


def _no_type_of_flags(highlight: Any) -> Any:
    """A highlighter of types that leaves out that of a flag, which takes no value."""

    def shown(text: Any) -> Any:
        return "" if str(text) == "<bool>" else highlight(text)

    return shown


for _name in ("highlighter", "negative_highlighter"):
    setattr(rich_utils, _name, _folding(getattr(rich_utils, _name)))
if hasattr(rich_utils, "types_highlighter"):  # older releases show no type of flags
    rich_utils.types_highlighter = _no_type_of_flags(rich_utils.types_highlighter)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}")


HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="cafe-tta",
    context_settings=HELP,
    cls=_Group,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cafe-tta {cafe_tta.__version__}")
        raise typer.Exit


@app.callback()
def start(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Keeps an image classifier accurate on corrupted images, without labels and without source data.

    \b
    [bold]1. A model.[/bold] Bring your own (timm:NAME, torchvision:NAME), or train one:
       cafe-tta train --data digits:train --output model

    \b
    [bold]2. Its statistics[/bold], once, at the training site, from source images:
       cafe-tta stats --model model/model.safetensors --data digits:train
                      --output stats.safetensors

    \b
    [bold]3. Adapt[/bold], where the images are; without labels, without source images:
       cafe-tta adapt --model model/model.safetensors --source stats.safetensors
                      --data photos --output out

    \b
    [bold]4. Look[/bold] at out/predictions.csv (file, class, confidence)
       and out/summary.json (what happened).

    \b
    [bold]5. Serve[/bold] it to many cameras, adapting while it answers:
       cafe-tta serve --model model/model.safetensors --source stats.safetensors

    All of it in two minutes, with 15 kinds of corruption: cafe-tta demo
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
    elif ctx.invoked_subcommand not in SHARED and torchrun_share() is not None:
        raise ValueError(f"{ctx.invoked_subcommand} runs in one process; torchrun is for: {', '.join(SHARED)}")


for command in (demo, train, stats, adapt, monitor, serve, simulate, corrupt, bench, report, methods):
    app.command(command.__name__, context_settings=HELP)(command)


def main() -> None:
    """Runs the command line."""
    warnings.showwarning = _show_warning  # in one line, without the place in our code
    app()
