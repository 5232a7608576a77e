"""`cafe-tta train`: a source classifier, for those who have none yet."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cafe_tta import data, models, storage
from cafe_tta.classifier import SplitClassifier, split_classifier
from cafe_tta.cli import inputs
from cafe_tta.cli.console import Interrupted, progress, readable_bytes, say, show_facts
from cafe_tta.source.train import CHECKPOINT_VERSION, TrainConfig
from cafe_tta.source.train import train as train_classifier

_RESULTS = ("model.safetensors", "posterior.safetensors", "train.json", "checkpoint.safetensors")


def train(
    data_spec: Annotated[
        str,
        typer.Option("--data", help="Labelled images: class folders, arrays:DIR, digits:train.", show_default=False),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the model.", show_default=False)],
    model: Annotated[
        str, typer.Option("--model", help="cafe:digits-resnet, timm:NAME, torchvision:NAME or a file to train on from.")
    ] = "cafe:digits-resnet",
    test: Annotated[
        str | None, typer.Option(help="Labelled images to tell the accuracy on in the end.", show_default=False)
    ] = None,
    epochs: Annotated[int, typer.Option(min=0)] = 20,
    swag_epochs: Annotated[
        int, typer.Option(min=0, help="Further epochs, for the posterior that `bacs` needs. 0: none.")
    ] = 5,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    lr: Annotated[float, typer.Option(min=0.0, help="At the start; falls to 0 along a cosine.")] = 0.1,
    swag_lr: Annotated[float, typer.Option(min=0.0)] = 0.01,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 5e-4,
    augment: Annotated[str, typer.Option(help="crop, crop-flip or none. Digits must not be flipped.")] = "crop",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Begin anew; or go on where an earlier run was stopped.")
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
        bool, typer.Option("--new-head", help="Keep all but the last layer of --weights: train on to other classes.")
    ] = False,
) -> None:
    """Train a source classifier. Small: the images must fit into memory.

    cafe-tta train --data digits:train --test digits:test --output model

    Writes model.safetensors, posterior.safetensors and train.json. A run that was stopped goes on when the same command is given again.
    """  # noqa: E501 - a line break here would be one in the help
    config = TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        swag_epochs=swag_epochs,
        swag_lr=swag_lr,
        augment=augment,  # type: ignore[arg-type] # TrainConfig checks it
        seed=seed,
    )
    settings = {
        "data": data_spec,
        "test": test,
        "model": model,
        "weights": weights,
        "pretrained": pretrained,
        "image_size": image_size,
        "mean": mean,
        "std": std,
        "head": head,
        "new_head": new_head,
        **asdict(config),
    }
    if fresh:
        for name in _RESULTS:
            (output / name).unlink(missing_ok=True)
    elif (output / "train.json").exists():
        _check_finished(output, settings)
        say(f"nothing to do: {output} holds this run, finished; --fresh trains anew")
        _show(json.loads((output / "train.json").read_text()), output)
        return
    place = inputs.choose_device(device)
    imageset = data.load(data_spec)
    if imageset.labels is None:
        raise ValueError(f"expected labelled images, but {data_spec} has no class folders and no labels")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of the first weights
        loaded = models.load(
            model,
            weights=weights,
            num_classes=int(imageset.labels.max()) + 1 if imageset.classes is None else len(imageset.classes),
            pretrained=pretrained,
            size=image_size,
            mean=inputs.three_numbers("mean", mean),
            std=inputs.three_numbers("std", std),
            new_head=new_head,
        )
    classifier = split_classifier(models.channels_last(loaded.model), head=head).to(place)
    classes = loaded.classes or imageset.classes
    images, labels = _all_images(imageset, loaded.preprocessing, classes, classifier.num_classes, workers)
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = output / "checkpoint.safetensors"
    done = _epochs_done(checkpoint)
    if done:
        say(f"going on after epoch {done} of {config.total_epochs} ({checkpoint}); --fresh begins anew")
    began = time.perf_counter()
    try:
        with progress("training", config.total_epochs) as advance:
            advance(done)
            result = train_classifier(classifier, images, labels, config, checkpoint, lambda report: advance(1))
    except KeyboardInterrupt as error:
        done = _epochs_done(checkpoint)
        raise Interrupted(f"{done} epochs of {config.total_epochs} are saved; the same command goes on", 2) from error
    size = models.save(output / "model.safetensors", classifier, loaded.architecture, loaded.preprocessing, classes)
    if result.posterior is not None:
        result.posterior.save(output / "posterior.safetensors")
    report = {
        "settings": settings,
        "images": len(images),
        "classes": None if classes is None else list(classes),
        "model_bytes": size,
        "seconds": time.perf_counter() - began,
        "losses": result.losses,
        "train_accuracy": result.train_accuracy,
        "test_accuracy": _test(test, classifier, loaded.preprocessing, classes, batch_size, workers) if test else None,
    }
    storage.write_bytes(output / "train.json", (json.dumps(report, indent=2) + "\n").encode())  # last: says "finished"
    checkpoint.unlink(missing_ok=True)
    _show(report, output)


def _check_finished(output: Path, settings: dict[str, Any]) -> None:
    theirs = json.loads((output / "train.json").read_text())["settings"]
    if names := sorted(key for key in theirs.keys() | settings.keys() if theirs.get(key) != settings.get(key)):
        shown = ", ".join(f"{name}={theirs.get(name)!r} there, {settings.get(name)!r} now" for name in names)
        raise ValueError(
            f"{output} holds a finished run with other settings: {shown}; choose another --output, or --fresh"
        )


def _epochs_done(checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    return int(storage.read(checkpoint, "training", CHECKPOINT_VERSION)[1]["epoch"])


def _all_images(
    imageset: data.ImageSet,
    preprocessing: models.Preprocessing,
    classes: tuple[str, ...] | None,
    num_classes: int,
    workers: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    labels, reason = inputs.match_labels(imageset, classes, num_classes)
    if labels is None or (labels < 0).any():
        raise ValueError(
            f"expected a class of the model for every image of {imageset.name}; {reason or 'some have none'}"
        )
    with progress("reading", len(imageset)) as advance:
        loader = inputs.Loader(imageset, preprocessing, 256, labels=labels, workers=workers, advance=advance)
        pairs = list(loader)
    inputs.say_unreadable(loader.unreadable)
    if not pairs:
        raise ValueError(f"none of the {len(imageset)} images of {imageset.name} could be read")
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def _test(
    spec: str,
    classifier: SplitClassifier,
    preprocessing: models.Preprocessing,
    classes: tuple[str, ...] | None,
    batch_size: int,
    workers: int,
) -> float:
    imageset = data.load(spec)
    labels, reason = inputs.match_labels(imageset, classes, classifier.num_classes)
    if labels is None:
        raise ValueError(f"expected labelled images to test on, but {spec}: {reason}")
    hits, total = 0, 0
    for images, truth in inputs.Loader(imageset, preprocessing, batch_size, labels=labels, workers=workers):
        with torch.no_grad():
            answers = classifier(images.to(classifier.head.weight)).argmax(1).cpu()
        hits += int((answers == truth).sum())
        total += len(truth)
    return hits / max(total, 1)


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
