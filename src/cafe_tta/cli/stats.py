"""`cafe-tta stats`: what the deployment site needs to know of the source images."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from cafe_tta import data
from cafe_tta.cli import inputs
from cafe_tta.cli.console import progress, readable_bytes, show_facts
from cafe_tta.groups import dead_dims
from cafe_tta.source.histograms import SourceHistograms
from cafe_tta.stats import FeatureStats, SourceStats


def stats(
    shards: Annotated[
        list[Path] | None, typer.Argument(help="Files to --merge.", show_default=False, metavar="[SHARD]...")
    ] = None,
    model: inputs.ModelOption = "",
    data_spec: inputs.DataOption = "",
    output: Annotated[
        Path | None, typer.Option(help="File for the statistics: what `cafe-tta adapt` takes.", show_default=False)
    ] = None,
    num_groups: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Groups of correlated features; else 128, or one for 16 features of a smaller model.",
            show_default=False,
        ),
    ] = None,
    max_group_size: Annotated[
        int, typer.Option(min=0, help="Wider groups are split: keep it below the batch size. 0: no limit.")
    ] = 128,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Keep the whole covariance too: larger, but `adapt` can tell the Fréchet distance."
        ),
    ] = False,
    feature_stats: Annotated[
        Path | None,
        typer.Option(help="Also write a shard, to --merge with those of other machines.", show_default=False),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Put shards together instead of reading images.")] = False,
    histograms: Annotated[
        Path | None, typer.Option(help="Also write what the method `fr` needs.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only so many images, drawn at random.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the grouping, and of --limit.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
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
    """Compute mean, covariance and groups of the source features: once, at the training site.

    cafe-tta stats --model model.safetensors --data images/ --output stats.safetensors

    Many machines: each writes a shard with --feature-stats; cafe-tta stats --merge SHARD... --output FILE joins them.
    """
    _check(shards or [], merge, model, data_spec, output, feature_stats, histograms)
    left_out: list[data.Unreadable] = []
    model_bytes = 0
    if merge:
        found = FeatureStats.merge(*(FeatureStats.load(shard) for shard in shards or []))
    else:
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
        model_bytes = chosen.classifier.num_bytes()
        imageset = data.load(data_spec)
        order = np.arange(len(imageset))
        if limit is not None:
            # At random: the first images of class folders would all be of one class.
            order = np.sort(np.random.default_rng(seed).permutation(len(imageset))[:limit])
        loader = inputs.Loader(imageset, chosen.preprocessing, batch_size, order=order, workers=workers)
        with progress("source features", len(order)) as loader.advance:
            found = FeatureStats.fit(chosen.classifier, loader)
        left_out = loader.unreadable
        if histograms is not None:
            with progress("histograms", 2 * len(order)) as loader.advance:
                SourceHistograms.fit(chosen.classifier, loader).save(histograms)
    inputs.say_unreadable(left_out)
    if feature_stats is not None:
        found.save(feature_stats)
    facts = [("images", f"{found.count}{f', {len(left_out)} unreadable left out' if left_out else ''}")]
    facts += _grouped(found, output, num_groups, max_group_size, seed, full, model_bytes)
    facts += [("shard", str(feature_stats))] if feature_stats else []
    facts += [("histograms", str(histograms))] if histograms else []
    show_facts(facts)


def _check(
    shards: list[Path], merge: bool, model: str, data_spec: str, output: Path | None, *others: Path | None
) -> None:
    if merge and (model or data_spec or not shards or output is None):
        raise ValueError("expected --merge with shard files and --output, and without --model and --data")
    if not merge and shards:
        raise ValueError(f"expected files such as {shards[0]} only after --merge")
    if not merge and not (model and data_spec):
        raise ValueError("expected --model and --data (or --merge and shard files); see cafe-tta stats --help")
    if output is None and others[0] is None:
        raise ValueError("expected --output FILE for the statistics, or --feature-stats FILE for a shard of them")
    for path in (output, *others):  # now, not after an hour of reading images
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


def _grouped(
    found: FeatureStats,
    output: Path | None,
    num_groups: int | None,
    max_group_size: int,
    seed: int,
    full: bool,
    model_bytes: int,
) -> list[tuple[str, str]]:
    dead = int(dead_dims(found.cov).sum())
    facts = [("features", f"{len(found.mean)}{f', of which {dead} never vary' if dead else ''}")]
    if output is None:
        return facts
    source: SourceStats = found.group(num_groups, seed=seed, max_group_size=max_group_size or None, keep_full=full)
    size = source.save(output)
    share = f": {size / model_bytes:.1%} of the model's {readable_bytes(model_bytes)}" if model_bytes else ""
    facts.append(("groups", f"{len(source.groups)}, the widest of {source.widest_group} features"))
    facts.append(("written", f"{output}, {readable_bytes(size)}{share}"))
    return facts
