"""`cafe-tta simulate`: cameras with changing weather play against a server, and the source model is the measure."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cafe_tta.cli.console import Advance, StopRequest, counted, progress, say, show_table

if TYPE_CHECKING:
    from cafe_tta.cli.inputs import Model
    from cafe_tta.simulate.summary import Summary, Tally

HOPELESS = 20  # requests lost before any was answered
_MODEL = "The source model, to compare with"


def simulate(
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8080",
    cameras: Annotated[int, typer.Option(min=1, help="How many; each has a story of weather, light or link.")] = 6,
    rate: Annotated[
        float, typer.Option(help="Images a second of a camera, on average; its own lies between half and 1.5 of it.")
    ] = 20.0,
    duration: Annotated[float | None, typer.Option(help="Seconds.  [default: 120]", show_default=False)] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="So many images in all, instead of --duration.", show_default=False)
    ] = None,
    images_per_request: Annotated[int, typer.Option(min=1, help="Images that a camera sends at once.")] = 4,
    period: Annotated[
        float | None,
        typer.Option(help="Seconds from one fog to the next.  [default: a third of the run]", show_default=False),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Wait for no moments: every camera sends as soon as it is answered.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="That the cameras are spread over.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="The same seed sends the same images.")] = 0,
    token: Annotated[
        str | None,
        typer.Option(envvar="CAFE_TTA_TOKEN", help="Bearer token, if a proxy asks for one.", show_default=False),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that the server may take to be ready.")] = 60.0,
    blocks: Annotated[int, typer.Option(min=1, help="Rows of the table over time.")] = 10,
    data: Annotated[str, typer.Option(help="Labelled images: digits:test, a folder with class folders, …")] = "",
    pool: Annotated[int, typer.Option(min=1, help="Images that are drawn from it, and sent again and again.")] = 1024,
    corruption_preset: Annotated[
        str, typer.Option(help="Parameters of the corruptions: cifar for small images, imagenet for large ones.")
    ] = "cifar",
    model: Annotated[
        str | None,
        typer.Option(
            help="As for `serve`.  [default: the embedded digits]", rich_help_panel=_MODEL, show_default=False
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="File of weights for it.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="All numbers, as JSON.", show_default=False)] = None,
    figure: Annotated[Path | None, typer.Option(help="Accuracy over time, as a picture.", show_default=False)] = None,
) -> None:
    """Play cameras against a server: fog comes and goes, nights are noisy, links are poor.

    Prints the accuracy of the server's answers over time, beside that of the unadapted model on the same images.
    Ends with code 1 if requests were lost. Two commands are a demonstration:

    \b
       cafe-tta serve
       cafe-tta simulate
    """
    if duration is not None and images is not None:
        raise ValueError("expected --duration or --images, but got both")
    for name, value in (("duration", duration), ("period", period)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"expected --{name} to be above 0 seconds, but got {value}")
    for path in (output, figure):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: the folder {path.absolute().parent} does not exist")

    from cafe_tta.simulate import album, play, stories, summary  # loads more: only when it is needed
    from cafe_tta.simulate.client import Client

    made = stories.make_cameras(cameras, rate, seed)
    together = sum(camera.rate for camera in made)
    length = duration or (images / together if images else 120.0)
    client = Client(url, token)
    client.until_ready(wait, say)
    name = _served_model(client)
    source = _source_model(model, weights)
    _check_classes(client, name, source)
    client.close()
    imageset, labels = _labelled(data or ("digits:test" if model is None else ""), source)
    conditions = sorted({condition for camera in made for condition in camera.story.conditions()})
    found = summary.Summary(made, length, blocks)
    with tempfile.TemporaryDirectory(prefix="cafe-tta-simulate-") as folder, StopRequest() as stop:
        with progress("preparing images", min(pool, len(imageset)) * len(conditions)) as advance:
            drawn = album.make(
                Path(folder), imageset, labels, _classify(source), conditions,
                preset=corruption_preset, seed=seed, most=pool, advance=advance,
            )  # fmt: skip
        say(
            f"{counted(cameras, 'camera')} with {together:.0f} images a second in all, for {length:.0f} s, "
            f"from {len(drawn)} images of {imageset.name}, against {client.url}"
        )
        game = play.Play(url, name, token, Path(folder), length, period or length / 3, images_per_request, not fast)
        start = time.monotonic()

        def begun() -> None:
            nonlocal start
            start = time.monotonic()

        with _watched(found, round(together * length)) as advance:
            for record in play.play(game, made, processes, lambda: bool(stop.signal_number) or _hopeless(found), begun):
                found.add(record)
                advance(record.images)
        seconds = time.monotonic() - start
    _show(found, seconds)
    numbers = found.numbers(seconds)
    if output is not None:
        decided = summary.settings(
            made, url=url, seed=seed, duration=length, period=game.period, images_per_request=images_per_request,
            data=imageset.name, pool=len(drawn), model=model or "embedded digits", processes=processes, fast=fast,
        )  # fmt: skip
        output.write_text(json.dumps({"settings": decided, **numbers}, indent=2) + "\n")
    if figure is not None:
        from cafe_tta.simulate.figure import draw

        draw(found, figure)
    for path in (output, figure):
        if path is not None:
            print(f"written: {path}")
    if found.lost:
        worst = "; ".join(f"{count} × {why}" for why, count in found.lost.most_common(3))
        say(f"error: {counted(sum(found.lost.values()), 'request')} lost: {worst}")
        raise typer.Exit(1)
    if stop.signal_number:
        raise typer.Exit(128 + stop.signal_number)


# Both models


def _served_model(client: Any) -> str:
    status = client.get("/api/status")
    if not isinstance(status, dict) or "name" not in status:
        raise RuntimeError(f"{client.url}/api/status says no model's name; is this a server of cafe-tta?")
    return str(status["name"])


def _check_classes(client: Any, name: str, source: "Model") -> None:
    outputs = {output["name"]: output["shape"] for output in client.get(f"/v2/models/{name}").get("outputs", [])}
    theirs = outputs.get("logits", [None])[-1]
    if theirs is not None and theirs != source.classifier.num_classes:
        raise ValueError(
            f"the server's model {name!r} tells {theirs} classes apart, the source model to compare with "
            f"{source.classifier.num_classes}; give the server's --model and --weights"
        )


def _source_model(model: str | None, weights: str | None) -> "Model":
    if model is None:
        if weights is not None:
            raise ValueError("--weights goes with --model, the name of an architecture")
        from cafe_tta.cli.embedded import embedded_digits

        return embedded_digits(say=say).model
    from cafe_tta.cli.inputs import load_model

    nothing: dict[str, Any] = {"num_classes": None, "image_size": None, "mean": None, "std": None, "head": None}
    return load_model(model, weights=weights, pretrained=False, device="cpu", **nothing)


def _classify(source: "Model") -> Any:
    import torch

    def logits(images: Any) -> torch.Tensor:
        with torch.no_grad():
            return source.classifier(source.preprocessing(images))

    return logits


def _labelled(spec: str, source: "Model") -> tuple[Any, Any]:
    from cafe_tta import data
    from cafe_tta.cli.inputs import match_labels

    if not spec:
        raise ValueError("expected --data, labelled images for the model: a folder with class folders, cifar10:test …")
    imageset = data.load(spec)
    labels, reason = match_labels(imageset, source.classes, source.classifier.num_classes)
    if labels is None:
        raise ValueError(f"accuracy cannot be told on {imageset.name}: {reason}")
    return imageset, labels


def _hopeless(found: "Summary") -> bool:
    """Whether the server answers nothing at all: there is no sense in going on for minutes."""
    return not found.overall.images and sum(found.lost.values()) >= HOPELESS


# What is shown


@contextmanager
def _watched(found: "Summary", total: int) -> Iterator[Advance]:
    """A bar where somebody watches, and a line for each block of time that is over."""
    said = 0
    with progress("playing", total) as bar:

        def advance(amount: int) -> None:
            nonlocal said
            bar(amount)
            while said + 1 < len(found.blocks) and _over(found, said):
                _say_block(found, said)
                said += 1

        yield advance
        if not found.overall.images:
            say("no image was answered")


def _over(found: "Summary", block: int) -> bool:
    """Whether every camera that has sent anything has gone on from a block. Late answers can still come: few."""
    return any(tally.images for tally in found.by_block_and_camera[block + 1]) and all(
        any(later[n].images for later in found.by_block_and_camera[block + 1 :])
        for n, tally in enumerate(found.by_camera)
        if tally.images
    )


def _say_block(found: "Summary", block: int) -> None:
    start, end = found.span(block)
    tally = found.blocks[block]
    if tally.images:
        text = f"{_clock(start)} to {_clock(end)}: {_percent(tally.served_accuracy)} % served, "
        text += f"{_percent(tally.source_accuracy)} % source model"
        print(text, file=sys.stderr, flush=True)


def _show(found: "Summary", seconds: float) -> None:
    over_time = _table("Accuracy over time", "time")
    for number, tally in enumerate(found.blocks):
        start, end = found.span(number)
        _row(over_time, f"{_clock(start)} – {_clock(end)}", "", tally)
    show_table(over_time)
    by_camera = _table("Accuracy by camera", "camera", "what it sees")
    for camera, tally in zip(found.cameras, found.by_camera, strict=True):
        _row(by_camera, camera.name, camera.story.tale, tally)
    by_camera.add_section()
    _row(by_camera, "all", "", found.overall, style="bold")
    show_table(by_camera)
    rate = found.overall.images / seconds if seconds else 0.0
    versions = f", by versions {min(found.versions)} to {max(found.versions)}" if found.versions else ""
    print(f"{found.overall.images} images answered in {seconds:.0f} s, {rate:.0f} a second{versions}")
    print(
        f"requests lost: {sum(found.lost.values())}; sent again because the server was busy: {found.busy}, "
        f"because the connection broke: {found.broken}"
    )


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for name in ("images", "source %", "served %", "gain", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(name, justify="right")
    return table


def _row(table: Table, name: str, tale: str, tally: "Tally", style: str = "") -> None:
    first = (name, tale) if len(table.columns) == 9 else (name,)
    gain = "–" if tally.gain is None else f"{tally.gain:+.1f}"
    accuracies = _percent(tally.source_accuracy), _percent(tally.served_accuracy)
    latencies = (_percent(tally.percentile(share)) for share in (50, 95, 99))
    table.add_row(*first, str(tally.images), *accuracies, gain, *latencies, style=style)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
