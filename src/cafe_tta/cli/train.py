"""`cafe-tta train`: a source classifier, for those who have none yet."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cafe_tta.cli.console import Interrupted, progress, readable_bytes, say, say_unreadable, show_facts
from cafe_tta.cli.flags import Given, command
from cafe_tta.data.options import DataOptions
from cafe_tta.models import ModelOptions
from cafe_tta.options import Options
from cafe_tta.source.recipes import RECIPES
from cafe_tta.source.recipes import recipe as recipe_named
from cafe_tta.source.train import Augmentation, TrainConfig
from cafe_tta.source.train_folder import DEFAULT_MODEL, TrainingRun

Made = TypeVar("Made", bound=Options)


@dataclass(frozen=True)
class TrainOptions(TrainConfig):
    """Options of `cafe-tta train`: those of training, with defaults for small images and a few minutes."""

    epochs: int = 20
    swag_epochs: int = 5
    batch_size: int = 64
    augment: Augmentation = "crop"


_RECIPES = "; ".join(f"{name}: {made.about}" for name, made in RECIPES.items())


@command("model")
def train(
    model: ModelOptions,
    images: DataOptions,
    config: TrainOptions,
    given: Given,
    output: Annotated[Path, typer.Option(help="Folder for the model.", show_default=False)],
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Network and training by name; other options change it. {_RECIPES}.",
            show_default=False,
            metavar="NAME",
        ),
    ] = None,
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

    cafe-tta train --recipe cifar10 --data cifar10:train --test cifar10:test --output model

    Writes model.safetensors, posterior.safetensors and train.json. The same command continues a run that was stopped.
    """
    if recipe is not None:
        made = recipe_named(recipe)
        model, training = changed(made.model, model, given), changed(made.config, config, given)
    else:
        model = model if model.model else replace(model, model=DEFAULT_MODEL)
        training = TrainConfig(**asdict(config))
    run = TrainingRun(images.data, output, model, training, test, new_head, recipe)
    if fresh:
        run.clear()
    elif report := run.finished():
        say(f"nothing to do: {output} holds this run, finished; --fresh trains anew")
        return _show(report, output)
    if done := run.epochs_done:
        say(f"going on after epoch {done} of {training.total_epochs} ({run.checkpoint}); --fresh begins anew")
    try:
        report = run.train(images.workers, progress, say_unreadable)
    except KeyboardInterrupt as error:
        saved = f"{run.epochs_done} epochs of {training.total_epochs} are saved"
        raise Interrupted(f"{saved}; the same command goes on", 2) from error
    return _show(report, output)


def changed(made: Made, asked: Options, given: Given) -> Made:
    """The options of a recipe, with those that stand on the command line."""
    names = {field.name for field in fields(made)} & given
    return replace(made, **{name: getattr(asked, name) for name in names})


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
