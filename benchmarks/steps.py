"""What a step of each method costs, against the least that such a step can cost. Prints a Markdown table.

python benchmarks/steps.py                                   # ResNet-26, 32×32, B=256
python benchmarks/steps.py --model torchvision:resnet50 --size 224 --batch 8 --repeats 3
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import timing
import torch
from torch import Tensor, nn

import cafe_tta as cafe
from cafe_tta import models
from cafe_tta.normalisation import batchnorm_layers
from cafe_tta.source.swag import Posterior, PosteriorMember
from cafe_tta.styles import StyleStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="timm:resnet26")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cuts", nargs="*", default=["layer1", "layer2", "layer3", "layer4"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = models.build(args.model, num_classes=10, size=args.size).eval()
    classifier = cafe.split_classifier(models.channels_last(model))
    images = torch.randn(args.batch, 3, args.size, args.size)
    loader = [torch.randn(64, 3, args.size, args.size) for _ in range(2 if args.size > 64 else 8)]
    settle(classifier, loader)
    source = made_up_groups(cafe.FeatureStats.fit(classifier, loader), args.groups)
    posterior = Posterior((around(classifier),))
    histograms = cafe.SourceHistograms.fit(classifier, loader)
    print(f"{args.model}, {args.size}×{args.size}, B={args.batch}, D={classifier.num_features}, "
          f"{len(source.groups)} groups, {args.threads} threads, median of {args.repeats}\n")  # fmt: skip
    print("| what | time | against | time | ratio | goal |\n|---|---:|---|---:|---:|---:|")

    create = partial(cafe.create, batch_size=args.batch)
    everything = plain_step(classifier, lambda c: list(c.backbone.parameters()))
    norm_only = plain_step(classifier, lambda c: [p for layer in batchnorm_layers(c) for p in layer.parameters()])
    gated = create("cafe", classifier, source, gate=True, gate_margin=1e9)
    adapters: dict[str, Callable[[Tensor], object]] = {
        "cafe": create("cafe", classifier, source),
        "cafe-dimwise": create("cafe-dimwise", classifier, source),
        "cafe-plus": create("cafe-plus", classifier, source, gate=False),  # these images look like the source's
        "infomax": create("infomax", classifier),
        "fr": create("fr", classifier, histograms),
        "bacs, one member": create("bacs", classifier, posterior),
        "tent": create("tent", classifier),
        "adabn": create("adabn", classifier),
        "unmix": create("unmix", classifier, source),
        "t3a": create("t3a", classifier),
        "cafe, gate closed": gated,
        "cafe, parameters=norm": create("cafe", classifier, source, parameters="norm"),
        "cafe, every=4": cycle(create("cafe", classifier, source, every=4), 4),
        **{f"cafe, adapt_from={cut}": create("cafe", classifier, source, adapt_from=cut) for cut in args.cuts},
    }
    source_only = create("source", classifier)
    limits: dict[str, Callable[[Tensor], object]] = {
        "plain step": everything,
        "plain step, BatchNorm parameters": norm_only,
        "forward": source_only,
        "forward, normalised with the batch": batch_forward(classifier),
    }
    sides = {name: partial(adapter, images) for name, adapter in {**limits, **adapters}.items()}
    seconds = timing.in_turns(sides, args.repeats)
    seconds["cafe, every=4"] /= 4
    for name, against, goal in (
        ("cafe", "plain step", "≤ 1.05"),
        ("cafe-dimwise", "plain step", ""),
        ("cafe-plus", "plain step", "≤ 1.10"),
        ("infomax", "plain step", ""),
        ("tent", "plain step, BatchNorm parameters", "≤ 1.05"),
        ("adabn", "forward", "≤ 1.05"),
        ("adabn", "forward, normalised with the batch", ""),
        ("unmix", "forward", "≤ 1.10"),
        ("t3a", "forward", "≤ 1.1"),
        ("fr", "plain step", "≤ 1.15"),
        ("bacs, one member", "plain step", "≤ 1.15"),
        ("cafe, gate closed", "forward", "≤ 1.15"),
        ("cafe, parameters=norm", "plain step", ""),
        ("cafe, every=4", "plain step", ""),
        *((f"cafe, adapt_from={cut}", "plain step", "") for cut in args.cuts),
    ):
        print(timing.line(name, seconds[name], against, seconds[against], goal))


def settle(classifier: cafe.SplitClassifier, loader: list[Tensor]) -> None:
    """BatchNorm statistics that suit the images: random weights would otherwise give features of any size."""
    from cafe_tta.source.swag import recompute_batchnorm

    recompute_batchnorm(classifier, loader)


def made_up_groups(stats: cafe.FeatureStats, num_groups: int) -> cafe.SourceStats:
    """Groups of the sizes that real features give, without the clustering, which is timed elsewhere."""
    dims = len(stats.mean)
    weights = torch.linspace(2.5, 0.2, num_groups)
    sizes = (weights / weights.sum() * dims).floor().long().clamp(min=1)
    sizes[0] += dims - sizes.sum()
    groups = torch.arange(dims).split(sizes.tolist())
    cov = stats.cov + 1e-3 * torch.eye(dims, dtype=torch.float64)
    known = {"alignment": {"largest": {"16": 1.0, "512": 0.5}}}
    styles = StyleStats(stats.styles.mean, stats.styles.cov)
    blocks = [cov[g][:, g] for g in groups]
    return cafe.SourceStats(stats.mean, groups, blocks, {**stats.meta, **known}, styles=styles)


def around(classifier: cafe.SplitClassifier) -> PosteriorMember:
    mean = {name: p.detach().clone() for name, p in classifier.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in classifier.named_buffers()}
    return PosteriorMember(mean, {name: torch.full_like(p, 1e-4) for name, p in mean.items()}, buffers)


def plain_step(
    classifier: cafe.SplitClassifier, moving: Callable[[cafe.SplitClassifier], list[Any]]
) -> Callable[[Tensor], object]:
    """Forward, backward of a trivial loss, and SGD: the limit."""
    network = copy.deepcopy(classifier).requires_grad_(False)
    parameters = moving(network)
    for parameter in parameters:
        parameter.requires_grad_(True)
    network.eval()
    for layer in batchnorm_layers(network):
        layer.train()
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.8)

    def step(images: Tensor) -> None:
        features = network.backbone(images)
        nn.functional.linear(features, network.head.weight, network.head.bias)
        features.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def batch_forward(classifier: cafe.SplitClassifier) -> Callable[[Tensor], object]:
    """A forward pass in which BatchNorm computes the batch's statistics: the limit where they are needed."""
    network = copy.deepcopy(classifier).eval()
    for layer in batchnorm_layers(network):
        layer.train()
    return torch.no_grad()(network)


def cycle(adapter: cafe.Adapter, batches: int) -> Callable[[Tensor], object]:
    def whole(images: Tensor) -> None:
        for _ in range(batches):
            adapter(images)

    return whole


if __name__ == "__main__":
    main()
