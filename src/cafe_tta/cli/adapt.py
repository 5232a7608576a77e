"""`cafe-tta adapt`: a class for every image of a folder, by a model that adapts to them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cafe_tta import data, storage
from cafe_tta.adapter import Adapter
from cafe_tta.cli import inputs, results
from cafe_tta.cli.console import StopRequest, counted, progress, say
from cafe_tta.cli.measure import batchnorm_counts, followed, measure, notes
from cafe_tta.cli.options import configuration
from cafe_tta.cli.run import Job, Reasons, clear, describe_differences, interrupted_run, run
from cafe_tta.data.imageset import Labels
from cafe_tta.methods import method as method_named
from cafe_tta.source.histograms import SourceHistograms
from cafe_tta.source.stats import SourceStats
from cafe_tta.source.swag import Posterior

_PANEL = "The method"


def adapt(
    model: inputs.ModelOption,
    data_spec: inputs.DataOption,
    output: Annotated[Path, typer.Option(help="Folder for the results.", show_default=False)],
    stats: Annotated[
        Path | None, typer.Option(help="The model's statistics, of `cafe-tta stats`.", show_default=False)
    ] = None,
    method: Annotated[str, typer.Option(help="See `cafe-tta methods`.", rich_help_panel=_PANEL)] = "cafe",
    preset: Annotated[
        str | None, typer.Option(help="A set of options by name.", rich_help_panel=_PANEL, show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="An option, such as lr=0.01; may be repeated.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    histograms: Annotated[
        Path | None, typer.Option(help="What `fr` needs.", rich_help_panel=_PANEL, show_default=False)
    ] = None,
    posterior: Annotated[
        Path | None, typer.Option(help="What `bacs` needs.", rich_help_panel=_PANEL, show_default=False)
    ] = None,
    source_data: Annotated[
        str | None,
        typer.Option(help="What `dann` needs: labelled source images.", rich_help_panel=_PANEL, show_default=False),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online/--offline",
            help="Answer each batch as it comes; or adapt to all images first, then answer them in evaluation mode.",
        ),
    ] = True,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images a batch; else as the method says.", show_default=False)
    ] = None,
    shuffle: Annotated[
        bool | None,
        typer.Option("--shuffle/--no-shuffle", help="Mix the images; else only --offline.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of --shuffle, and of the images that are measured.")] = 0,
    measured: Annotated[
        int, typer.Option("--measure", min=0, help="Compare before and after on so many images, at the end. 0: do not.")
    ] = 1024,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results of an earlier run.")] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Batches after which the progress is saved.")] = 50,
    workers: inputs.WorkersOption = 0,
    device: inputs.DeviceOption = "auto",
    weights: inputs.WeightsOption = None,
    num_classes: inputs.NumClassesOption = None,
    pretrained: inputs.PretrainedOption = False,
    image_size: inputs.ImageSizeOption = None,
    mean: inputs.MeanOption = None,
    std: inputs.StdOption = None,
    head: inputs.HeadOption = None,
) -> None:
    """Classify the images of a folder with a model that adapts to them. Needs no labels.

    cafe-tta adapt --model model.safetensors --stats stats.safetensors --data photos/ --output out

    Writes predictions.csv (file, class, confidence), summary.json, state.safetensors (what the model became) and, where images cannot be read, unreadable.csv. Labels of class folders are only used to tell the accuracy.
    """  # noqa: E501 - a line break here would be one in the help
    kind = method_named(method)
    options = [*(settings or []), *([] if batch_size is None else [f"batch_size={batch_size}"])]
    config = configuration(method, preset, options)
    _check_output(output, resume, overwrite)
    paths = {"stats": stats, "histograms": histograms, "posterior": posterior}
    _check_needs(method, kind.needs, paths, source_data)
    chosen = inputs.load_model(
        model,
        weights=weights,
        num_classes=num_classes,
        pretrained=pretrained,
        image_size=image_size,
        mean=mean,
        std=std,
        head=head,
        device=device,
    )
    statistics = None if stats is None else SourceStats.load(stats)
    if statistics is not None:
        statistics.check_belongs_to(chosen.classifier)
    source: Any = None
    if kind.needs == "stats":
        source = statistics
    elif kind.needs == "histograms":
        source = SourceHistograms.load(str(histograms))
    elif kind.needs == "posterior":
        source = Posterior.load(str(posterior))
    elif kind.needs == "data":
        source = _source_loader(str(source_data), chosen, config.batch_size, seed)
    adapter = kind(chosen.classifier, source, config)
    counts = batchnorm_counts(adapter)
    imageset = data.load(data_spec)
    labels, no_labels = inputs.match_labels(imageset, chosen.classes, chosen.classifier.num_classes)
    mixed = shuffle if shuffle is not None else not online
    order = np.random.default_rng(seed).permutation(len(imageset)) if mixed else np.arange(len(imageset))
    if not mixed and method != "source" and imageset.classes is not None and _class_by_class(imageset.labels, order):
        say("note: the images come class by class, which misleads every method; --shuffle mixes them")
    run_settings = {
        "method": method,
        "options": asdict(config),
        "online": online,
        "shuffle": mixed,
        "seed": seed,
        "images": len(imageset),
        "files": _digest(imageset.item_name(index).encode(errors="surrogateescape") for index in range(len(imageset))),
        "preprocessing": str(chosen.preprocessing),
        "source": {name: _digest([path.read_bytes()]) for name, path in paths.items() if path and name == kind.needs},
        "source_data": source_data,
    }
    if (output / "summary.json").exists() and not overwrite:
        _check_finished(output, run_settings, adapter)
        say(f"nothing to do: the run in {output} is finished; --overwrite starts anew")
        return
    output.mkdir(parents=True, exist_ok=True)
    if overwrite:
        results.remove_results(output)
    job = Job(
        adapter=adapter,
        imageset=imageset,
        preprocessing=chosen.preprocessing,
        order=order,
        batch_size=config.batch_size,
        online=online,
        output=output,
        save_every=save_every,
        settings=run_settings,
        workers=workers,
    )
    with StopRequest() as stop, progress("adapting", len(order) * len(job.passes)) as advance:
        answers, position = run(job, resume, stop, advance)
    results.write_unreadable(output, position.unreadable)
    if not len(answers):
        clear(job)
        none = "the only image could not" if len(imageset) == 1 else f"none of the {len(imageset)} images could"
        raise ValueError(f"{none} be read; {output / 'unreadable.csv'} says why")
    results.write_predictions(output / "predictions.csv", imageset, answers, chosen.classes)
    adapter.save(output / "state.safetensors")
    measurement = None
    if measured:
        measurement = measure(
            chosen.classifier,
            adapter,
            imageset,
            chosen.preprocessing,
            count=measured,
            seed=seed,
            batch_size=config.batch_size,
            stats=statistics,
            labels=labels,
            workers=workers,
        )
    remarks = _never_adapted(method, adapter, position.reasons) + notes(
        measurement, followed(adapter, counts), online=online, adapter=adapter, images=len(answers)
    )
    accuracy, labelled = results.accuracy(answers, labels)
    summary = {
        "method": method,
        "options": asdict(config),
        "mode": "online" if online else "offline",
        "model": chosen.architecture,
        "images": len(answers),
        "unreadable": len(position.unreadable),
        "seconds": position.seconds,
        "images_per_second": len(answers) / position.seconds,
        "batches": adapter.counters.batches,
        "steps": adapter.counters.steps,
        "refused_steps": adapter.counters.refused,
        "batches_without_step": position.reasons.total(),
        "most_frequent_reason": position.reasons.most_frequent()[1] or None,
        "most_frequent_reason_batches": position.reasons.most_frequent()[0],
        "accuracy": accuracy,
        "labelled_images": labelled,
        "measured": None if measurement is None else results.measured(measurement),
        "notes": remarks,
        "settings": run_settings,
    }
    storage.write_bytes(
        output / "summary.json", (json.dumps(summary, indent=2) + "\n").encode()
    )  # last: says "finished"
    clear(job)
    results.show(summary, output, no_labels, statistics)
    for remark in remarks:
        say(f"note: {remark}")


# What is checked before anything slow begins


def _check_output(output: Path, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ValueError("expected --resume or --overwrite, but got both")
    if output.exists() and not output.is_dir():
        raise ValueError(f"expected --output to be a folder, but {output} is a file")
    if (output / "summary.json").exists() and not overwrite:
        if not resume:
            raise ValueError(f"{output} holds the results of a finished run; --overwrite replaces them")
        return
    if interrupted_run(output) and not (resume or overwrite):
        raise ValueError(f"{output} holds a run that was stopped; --resume goes on with it, --overwrite starts anew")
    if resume and not interrupted_run(output):
        raise ValueError(f"there is no stopped run in {output} to --resume; leave the option out to start one")


def _check_finished(output: Path, settings: dict[str, Any], adapter: Adapter) -> None:
    """Refuses to take up a finished run with other settings, or with another model."""
    try:
        theirs = json.loads((output / "summary.json").read_text())["settings"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{output} holds the results of a finished run; --overwrite replaces them") from None
    if shown := describe_differences(theirs, settings):
        raise ValueError(f"{output} holds a finished run with other settings: {shown}; --overwrite replaces it")
    if (output / "state.safetensors").is_file():
        adapter.load(output / "state.safetensors")  # says if it is of another model


def _never_adapted(method: str, adapter: Adapter, reasons: Reasons) -> list[str]:
    if adapter.counters.steps or method == "source":
        return []
    batches = counted(adapter.counters.batches, "batch", "batches")
    return [f"nothing was adapted: {batches} answered without a step: {reasons.most_frequent()[1]}"]


def _check_needs(method: str, needs: str | None, paths: dict[str, Path | None], source_data: str | None) -> None:
    if needs == "data":
        if source_data is None:
            raise ValueError(
                f"{method} is no test-time adaptation: it needs labelled source images: --source-data SPEC"
            )
    elif needs is not None and paths[needs] is None:
        how = {
            "stats": "make them with: cafe-tta stats --model … --data SOURCE --output FILE",
            "histograms": "make them with: cafe-tta stats --model … --data SOURCE --output … --histograms FILE",
            "posterior": "cafe-tta train writes one",
        }
        raise ValueError(f"{method} needs --{needs} FILE; {how[needs]}")


def _class_by_class(labels: Labels | None, order: Labels) -> bool:
    return labels is not None and bool(labels.max() > 0) and bool((np.diff(labels[order]) >= 0).all())


def _source_loader(spec: str, model: inputs.Model, batch_size: int, seed: int) -> inputs.Loader:
    imageset = data.load(spec)
    labels, reason = inputs.match_labels(imageset, model.classes, model.classifier.num_classes)
    if labels is None or (labels < 0).any():
        raise ValueError(f"expected a label of the model for every image of {spec}; {reason or 'some have none'}")
    order = np.random.default_rng(seed).permutation(len(imageset))
    order = order[: max(len(order) // batch_size, 1) * batch_size]  # a last batch of one image could not be normalised
    return inputs.Loader(imageset, model.preprocessing, batch_size, order=order, labels=labels)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
