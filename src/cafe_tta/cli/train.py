"""`cafe-tta train`: a source classifier, for those who have none yet."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cafe_tta.cli.console import Interrupted, progress, readable_bytes, say, say_unreadable, show_facts
from cafe_tta.cli.flags import command
from cafe_tta.data.options import DataOptions
from cafe_tta.models import ModelOptions
from cafe_tta.source.train import Augmentation, TrainConfig
from cafe_tta.source.train_folder import DEFAULT_MODEL, TrainingRun


@dataclass(frozen=True)
class TrainOptions(TrainConfig):
    """Options of `cafe-tta train`: those of training, with defaults for small images and a few minutes."""

    epochs: int = 20
    swag_epochs: int = 5
    batch_size: int = 64
    augment: Augmentation = "crop"


@command("model")
def train(
    model: ModelOptions,
    images: DataOptions,
    config: TrainOptions,
    output: Annotated[Path, typer.Option(help="Folder for the model.", show_default=False)],
    test: Annotated[
        str | None, typer.Option(help="Labelled images to measure the accuracy on in the end.", show_default=False)
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Start anew, or continue a run that was stopped.")
    ] = False,
    new_head: Annotated[
        bool, typer.Option("--new-head", help="Keep all but the last layer of --weights, to train for other classes.")
    ] = False,
) -> None:
    """Train a source classifier on labelled images. They must fit into memory.

    cafe-tta train --data digits:train --test digits:test --output model

    Writes model.safetensors, posterior.safetensors and train.json. The same command continues a run that was stopped.
    """
    if not model.model:
        model = replace(model, model=DEFAULT_MODEL)
    training = TrainConfig(**asdict(config))
    run = TrainingRun(images.data, output, model, training, test, new_head)
    if fresh:
        run.clear()
    elif report := run.finished():
        say(f"nothing to do: {output} holds this run, finished; --fresh trains anew")
        return _show(report, output)
    if done := run.epochs_done:
        say(f"going on after epoch {done} of {config.total_epochs} ({run.checkpoint}); --fresh begins anew")
    try:
        report = run.train(images.workers, progress, say_unreadable)
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
