"""`cafe-tta simulate`: cameras with changing weather send images to a server; its answers beside the source model's."""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cafe_tta.cli.console import Advance, StopRequest, counted, progress, say, show_table
from cafe_tta.cli.flags import command
from cafe_tta.simulate import SCENARIOS, Simulation, SimulationOptions, Summary
from cafe_tta.simulate.scores import FAR_BELOW, WINDOW, Scores
from cafe_tta.simulate.summary import Tally


@command()
def simulate(
    options: SimulationOptions,
    output: Annotated[Path | None, typer.Option(help="Write all numbers to a JSON file.", show_default=False)] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the accuracy over time to an image file.", show_default=False)
    ] = None,
    list_scenarios: Annotated[
        bool,
        typer.Option("--list", help="List the scenarios, with a sentence each, and end.", rich_help_panel="Scenarios"),
    ] = False,
) -> None:
    """Simulate cameras that send images to a server: fog comes and goes, nights are noisy, links are poor.

    Prints the accuracy of the server's answers over time, beside that of the unadapted model on the same images.
    Ends with code 1 if requests were lost. Two commands are a demonstration:

    \b
       cafe-tta serve
       cafe-tta simulate

    With --scenario, six honest cameras are played beside somebody who means harm, and the worst window of 8 rounds is
    compared with the source model.
    """
    if list_scenarios:
        _list()
        return
    for path in (output, figure):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: the folder {path.absolute().parent} does not exist")
    simulation = Simulation(options, say)
    summary = simulation.summary
    with tempfile.TemporaryDirectory(prefix="cafe-tta-simulate-") as folder, StopRequest() as stop:
        with progress("preparing images", simulation.images_to_prepare) as advance:
            simulation.prepare(Path(folder), advance)
        _announce(simulation)
        with _watched(summary, round(simulation.rate * simulation.duration)) as advance:
            for record in simulation.play(Path(folder), lambda: bool(stop.signal_number)):
                advance(record.images)
    _show(summary, simulation.seconds)
    if simulation.scores is not None:
        _show_scores(simulation.scores, simulation.steps)
    if output is not None:
        output.write_text(json.dumps(simulation.results(), indent=2) + "\n")
    if figure is not None:
        from cafe_tta.simulate.figure import draw

        draw(summary, figure)
    for path in (output, figure):
        if path is not None:
            print(f"written: {path}")
    if summary.lost:
        worst = "; ".join(f"{count} × {why}" for why, count in summary.lost.most_common(3))
        say(f"error: {counted(sum(summary.lost.values()), 'request')} lost: {worst}")
        raise typer.Exit(1)
    if stop.signal_number:
        raise typer.Exit(128 + stop.signal_number)


def _announce(simulation: Simulation) -> None:
    if simulation.scenario is not None:
        say(f"{simulation.scenario.name}: {simulation.scenario.text}")
    say(
        f"{counted(len(simulation.cameras), 'camera')} with {simulation.rate:.0f} images a second in all, for "
        f"{simulation.duration:.0f} s, from {simulation.num_images} images of {simulation.imageset.name}, "
        f"against {simulation.url}"
    )


@contextmanager
def _watched(summary: Summary, total: int) -> Iterator[Advance]:
    """A progress bar on a terminal, and a line for each block of time that is over."""
    printed = 0
    with progress("playing", total) as bar:

        def advance(amount: int) -> None:
            nonlocal printed
            bar(amount)
            while printed + 1 < len(summary.blocks) and summary.is_over(printed):
                _print_block(summary, printed)
                printed += 1

        yield advance
        if not summary.overall.images:
            say("no image was answered")


def _print_block(summary: Summary, block: int) -> None:
    start, end = summary.span(block)
    tally = summary.blocks[block]
    if tally.images:
        text = f"{_clock(start)} to {_clock(end)}: {_number(tally.served_accuracy)} % served, "
        text += f"{_number(tally.source_accuracy)} % source model"
        print(text, file=sys.stderr, flush=True)


def _show(summary: Summary, seconds: float) -> None:
    spans = [summary.span(block) for block in range(len(summary.blocks))]
    over_time = _table("Accuracy over time", "time")
    for (start, end), tally in zip(spans, summary.blocks, strict=True):
        over_time.add_row(f"{_clock(start)} – {_clock(end)}", *_cells(tally))
    show_table(over_time)
    by_camera = _table("Accuracy by camera", "camera", "what it sees")
    for camera, tally in zip(summary.cameras, summary.by_camera, strict=True):
        by_camera.add_row(camera.name, camera.text, *_cells(tally))
    by_camera.add_section()
    by_camera.add_row("all", "", *_cells(summary.overall), style="bold")
    show_table(by_camera)
    rate = summary.overall.images / seconds if seconds else 0.0
    versions = f", by versions {min(summary.versions)} to {max(summary.versions)}" if summary.versions else ""
    print(f"{summary.overall.images} images answered in {seconds:.0f} s, {rate:.0f} a second{versions}")
    print(
        f"requests lost: {sum(summary.lost.values())}; sent again because the server was busy: {summary.busy}, "
        f"because the connection broke: {summary.broken}"
    )


def _show_scores(scores: Scores, steps: Mapping[str, int]) -> None:
    print(
        f"worst window of {WINDOW} rounds: {scores.worst:+.1f} points against the source model; "
        f"{scores.far_below} of {len(scores.windows)} windows more than {FAR_BELOW:.0f} points below it"
    )
    taken = ", ".join(
        f"{steps.get(kind, 0)} {kind.replace('_', ' ')}" for kind in ("accepted", "refused", "rolled_back")
    )
    print(f"the server's steps: {taken}")


def _list() -> None:
    table = Table(title="Scenarios: cafe-tta simulate --scenario NAME", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("what happens")
    for scenario in SCENARIOS.values():
        table.add_row(scenario.name, scenario.text)
    show_table(table)


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for name in ("images", "source %", "served %", "gain", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(name, justify="right")
    return table


def _cells(tally: Tally) -> list[str]:
    gain = "–" if tally.gain is None else f"{tally.gain:+.1f}"
    accuracies = _number(tally.source_accuracy), _number(tally.served_accuracy)
    return [str(tally.images), *accuracies, gain, *(_number(tally.percentile(share)) for share in (50, 95, 99))]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
