"""`cafe-tta adapt`: a class for every image of a folder, by a model that adapts to them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cafe_tta import data
from cafe_tta.adapter import Adapter
from cafe_tta.cli.console import Interrupted, StopRequest, counted, progress, say, show_facts
from cafe_tta.cli.flags import Given, command
from cafe_tta.data.options import DataOptions
from cafe_tta.methods.choice import Chosen, MethodOptions
from cafe_tta.models import ModelOptions
from cafe_tta.options import Options, option
from cafe_tta.runs import FolderRun, RunOptions, Stopped
from cafe_tta.runs.folder import check_output, check_sheet, digest
from cafe_tta.runs.results import CLUSTERS, SHEET
from cafe_tta.source import Reference


@dataclass(frozen=True)
class AdapterOptions(Options):
    """What the adapter of `cafe-tta adapt` begins with."""

    batch_size: int | None = option(None, "Images per batch; by default the method's.", least=1)
    state: Path | None = option(
        None,
        "Go on from the state.safetensors of an earlier run. Method, options and source values are in it.",
        metavar="FILE",
    )
    apply: Path | None = option(
        None,
        "Answer with the state.safetensors of an earlier run, in evaluation mode: nothing adapts.",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state is not None and self.apply is not None:
            raise ValueError("expected `state`, to go on adapting, or `apply`, to only answer, but got both")

    @property
    def file(self) -> Path | None:
        return self.state or self.apply

    def adapter(
        self, method: MethodOptions, model: ModelOptions, options: RunOptions, given: Given
    ) -> tuple[Chosen, Adapter]:
        """The adapter, and what it is made of."""
        size = {} if self.batch_size is None else {"batch_size": self.batch_size}
        if self.file is not None:
            chosen, adapter = method.load_state(self.file, model, options.seed, given)
            adapter.config = replace(adapter.config, **size)
            return chosen, adapter
        config = method.config(**size)
        check_sheet(options, method.method, config)
        chosen = method.load(model, options.seed)
        return chosen, method.adapter(chosen.model, chosen.sources, config)


@command()
def adapt(
    model: ModelOptions,
    images: DataOptions,
    method: MethodOptions,
    begin: AdapterOptions,
    options: RunOptions,
    given: Given,
    output: Annotated[Path, typer.Option(help="Folder for the results.", show_default=False)],
) -> None:
    """Classify the images of a folder with a model that adapts to them. Needs no labels.

    cafe-tta adapt --model model.safetensors --source stats.safetensors --data photos/ --output out

    cafe-tta adapt --model model.safetensors --state out/state.safetensors --data tomorrow/ --output next

    Writes predictions.csv (file, class, confidence), summary.json, state.safetensors (the adapted state) and, where images cannot be read, unreadable.csv; with --sheet also clusters.png and clusters.csv. Ends with a sentence: which shift was seen, what adapting changed, and whose answers are given. Labels of class folders are only used to report the accuracy.
    """  # noqa: E501 - a line break here would be one in the help
    check_output(output, options)
    chosen, adapter = begin.adapter(method, model, options, given)
    stats = chosen.sources.get("stats")
    run = FolderRun(
        chosen.model,
        adapter,
        data.load(images.data),
        output,
        options,
        reference=None if stats is None else Reference(stats),
        sources=_digests(method, chosen.sources) if begin.file is None else {},
        workers=images.workers,
        state=None if begin.file is None else digest([begin.file.read_bytes()]),
        apply=begin.apply is not None,
    )
    if run.finished():
        _again(run)
        return
    for line in chosen.notes:
        say(line)
    if run.adapter.adapts and not run.apply and not options.shuffled and run.class_by_class:
        say("note: the images come class by class, which misleads every method; --shuffle shuffles them")
    with StopRequest() as stop, progress("adapting", run.total) as advance:
        try:
            summary = run.run(advance, lambda: bool(stop.signal_number))
        except Stopped as stopped:
            text = f"{stopped}; the same command with --resume continues"
            raise Interrupted(text, stop.signal_number) from None
    _show(summary, run)


def _again(run: FolderRun) -> None:
    """What is left to do for a run that is finished: a sheet that was not asked for then."""
    if not run.options.sheet or (run.output / SHEET).exists():
        say(f"nothing to do: the run in {run.output} is finished; --overwrite starts over")
        return
    with progress("drawing", len(run.imageset)) as advance:
        clusters = run.draw_sheet(advance)
    show_facts([("clusters", _sizes(clusters.sizes)), ("written", _sheet_files(run.output))])


def _digests(method: MethodOptions, sources: dict[str, Any]) -> dict[str, str]:
    """What a resumed run must have in common with the first one: the source values that its method needs."""
    files = [Path(text) for text in method.source if Path(text).is_file()]
    # `sources` has the files' kinds in the order of the files.
    by_kind = dict(zip((kind for kind in sources if kind != "data"), files, strict=True))
    labelled = ", ".join(text for text in method.source if Path(text) not in files)
    return {kind: digest([by_kind[kind].read_bytes()]) if kind in by_kind else labelled for kind in method.kinds}


def _show(summary: dict[str, Any], run: FolderRun) -> None:
    output, left_out = run.output, summary["unreadable"]
    unreadable = f", {left_out} unreadable left out (see unreadable.csv)" if left_out else ""
    facts = [
        ("method", f"{summary['method']}, {summary['mode']}, batches of {summary['options']['batch_size']}"),
        ("images", f"{summary['images']}{unreadable}"),
        ("time", f"{summary['seconds']:.1f} s, {summary['images_per_second']:.0f} images/s"),
        ("steps", ", ".join(_steps(summary))),
    ]
    if summary["batches_without_step"]:
        facts.append(("without a step", _without_step(summary)))
    if summary["clusters"] is not None:
        recent = sum(summary["clusters"])
        of = "" if run.options.sheet or recent >= summary["images"] else f" (of the last {recent} images)"
        facts.append(("clusters", _sizes(summary["clusters"]) + of))
    right = f"accuracy unknown: {run.why_no_labels}"
    if summary["accuracy"] is not None:
        right = f"{summary['accuracy']:.1%} of {summary['labelled_images']} right"
    facts.append(("answers given", f"{right} ({summary['answers']} model, predictions.csv)"))
    facts += _measured(summary["measured"], run.reference)
    facts += [("", ""), ("written", str(output / "predictions.csv")), ("", f"{output}/summary.json, state.safetensors")]
    facts += [("", _sheet_files(output))] if run.options.sheet else []
    show_facts(facts)
    for note in summary["notes"]:
        say(f"note: {note}")
    print(f"\n{summary['verdict']}")


def _sizes(sizes: list[int]) -> str:
    """How many clusters there are, and how many images the largest have.

    >>> _sizes([312, 280, 190]), _sizes([9, 8, 7, 6, 5, 4, 3, 2, 1])
    ('3: 312, 280, 190', '9: 9, 8, 7, 6, 5, 4, 3, 2, …')
    """
    return f"{len(sizes)}: {', '.join(map(str, sizes[:8]))}{', …' if len(sizes) > 8 else ''}"


def _sheet_files(output: Path) -> str:
    return f"{output}/{SHEET}, {CLUSTERS}"


def _steps(summary: dict[str, Any]) -> Iterator[str]:
    yield str(summary["steps"])
    if taken_back := summary["rolled_back_steps"]:
        yield f"{taken_back} taken back by the judge"
    if refused := summary["refused_steps"]:
        yield f"{refused} refused: not finite"


def _without_step(summary: dict[str, Any]) -> str:
    some, every = summary["batches_without_step"], summary["batches"]
    reason, count = summary["most_frequent_reason"], summary["most_frequent_reason_batches"]
    return f"{some} of {counted(every, 'batch', 'batches')}: {reason}{f' ({count} of them)' if count < some else ''}"


def _measured(measured: dict[str, Any] | None, reference: Reference | None) -> list[tuple[str, str]]:
    if not measured:
        return []
    on = counted(measured["images"], "image")
    facts = [("", ""), ("compared", f"the source model -> the adapted one, on {on}")]
    unknown = "unknown: no source statistics given"
    if drift := _arrow(measured.get("drift"), ".2f"):
        facts.append(("drift", f"{drift} (1: like the source images)"))
    facts.append(("alignment loss", _arrow(measured["alignment"], ".3f") or unknown))
    unknown = unknown if reference is None else "unknown: the statistics were made without --full"
    facts.append(("Fréchet distance", _arrow(measured["frechet_distance"], ".3f") or unknown))
    if measured["accuracy"]:
        facts.append(("accuracy", _arrow(measured["accuracy"], ".1%")))
    return facts


def _arrow(pair: dict[str, float] | None, digits: str) -> str:
    return "" if pair is None else f"{pair['before']:{digits}} -> {pair['after']:{digits}}"
