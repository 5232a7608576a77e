"""`cafe-tta train`: a source classifier, for those who have none yet."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cafe_tta.cli import inputs
from cafe_tta.cli.console import Interrupted, progress, readable_bytes, say, show_facts
from cafe_tta.source.train import TrainConfig
from cafe_tta.source.train_folder import DEFAULT_MODEL, TrainingRun

_flag = partial(inputs.flag, TrainConfig)


def train(
    data_spec: inputs.DataOption,
    output: Annotated[Path, typer.Option(help="Folder for the model.", show_default=False)],
    model: inputs.ModelOption = DEFAULT_MODEL,
    test: Annotated[
        str | None, typer.Option(help="Labelled images to measure the accuracy on in the end.", show_default=False)
    ] = None,
    epochs: Annotated[int, _flag("epochs", min=0)] = 20,
    swag_epochs: Annotated[int, _flag("swag_epochs", min=0)] = 5,
    batch_size: Annotated[int, _flag("batch_size", min=1)] = 64,
    lr: Annotated[float, _flag("lr", min=0.0)] = 0.1,
    swag_lr: Annotated[float, _flag("swag_lr", min=0.0)] = 0.01,
    weight_decay: Annotated[float, _flag("weight_decay", min=0.0)] = 5e-4,
    augment: Annotated[str, _flag("augment")] = "crop",
    seed: Annotated[int, _flag("seed", min=0)] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Start anew, or continue a run that was stopped.")
    ] = False,
    workers: inputs.WorkersOption = 0,
    device: inputs.DeviceOption = "auto",
    weights: inputs.WeightsOption = None,
    pretrained: inputs.PretrainedOption = False,
    image_size: inputs.ImageSizeOption = None,
    mean: inputs.MeanOption = None,
    std: inputs.StdOption = None,
    head: inputs.HeadOption = None,
    new_head: Annotated[
        bool, typer.Option("--new-head", help="Keep all but the last layer of --weights, to train for other classes.")
    ] = False,
) -> None:
    """Train a source classifier on labelled images. They must fit into memory.

    cafe-tta train --data digits:train --test digits:test --output model

    Writes model.safetensors, posterior.safetensors and train.json. The same command continues a run that was stopped.
    """
    config = TrainConfig(
        epochs=epochs, batch_size=batch_size, lr=lr, weight_decay=weight_decay, swag_epochs=swag_epochs,
        swag_lr=swag_lr, augment=augment, seed=seed,  # type: ignore[arg-type] # TrainConfig checks it
    )  # fmt: skip
    options = inputs.model_options(
        model, weights=weights, pretrained=pretrained, image_size=image_size, mean=mean, std=std, head=head,
        device=device,
    )  # fmt: skip
    run = TrainingRun(data_spec, output, options, config, test, new_head)
    if fresh:
        run.clear()
    elif report := run.finished():
        say(f"nothing to do: {output} holds this run, finished; --fresh trains anew")
        return _show(report, output)
    if done := run.epochs_done:
        say(f"going on after epoch {done} of {config.total_epochs} ({run.checkpoint}); --fresh begins anew")
    try:
        report = run.train(workers, progress, inputs.say_unreadable)
    except KeyboardInterrupt as error:
        saved = f"{run.epochs_done} epochs of {config.total_epochs} are saved"
        raise Interrupted(f"{saved}; the same command goes on", 2) from error
    return _show(report, output)


def _show(report: dict[str, Any], output: Path) -> None:
    facts = [
        ("images", f"{report['images']}"),
        ("time", f"{report['seconds']:.1f} s"),
        ("accuracy", f"{report['train_accuracy']:.1%} on the training images"),
    ]
    if report["test_accuracy"] is not None:
        facts.append(("", f"{report['test_accuracy']:.1%} on {report['settings']['test']}"))
    facts.append(("written", f"{output / 'model.safetensors'}, {readable_bytes(report['model_bytes'])}"))
    if report["settings"]["swag_epochs"]:
        facts.append(("", f"{output / 'posterior.safetensors'}"))
    show_facts(facts)
