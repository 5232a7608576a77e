"""What PyTorch itself offers to make a CAFe step faster, each against the step without it. Prints a Markdown table.

python benchmarks/torch_options.py
"""

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import timing
import torch
from steps import made_up_groups, settle
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import cafe_tta as cafe
from cafe_tta import models
from cafe_tta.classifier import SplitClassifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="timm:resnet26")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which needs a C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = models.build(args.model, num_classes=10, size=args.size).eval()
    classifier = cafe.split_classifier(model)
    loader = [torch.randn(64, 3, args.size, args.size) for _ in range(2 if args.size > 64 else 8)]
    settle(classifier, loader)
    source = made_up_groups(cafe.FeatureStats.fit(classifier, loader), 128)
    images = torch.randn(args.batch, 3, args.size, args.size)
    last = images.contiguous(memory_format=torch.channels_last)

    plain = cafe.create("cafe", classifier, source)
    laid_out = cafe.create("cafe", models.channels_last(copy.deepcopy(classifier)), source)
    sides: dict[str, Callable[[], object]] = {
        "step": partial(plain, images),
        "step, weights channels_last": partial(laid_out, images),
        "step, weights and images channels_last": partial(laid_out, last),
        "step, fused SGD": partial(_with_sgd(classifier, source, fused=True), images),
        "step, SGD foreach": partial(_with_sgd(classifier, source, foreach=True), images),
        "forward": partial(_evaluate, classifier, images),
        "forward, channels_last": partial(_evaluate, models.channels_last(copy.deepcopy(classifier)), images),
    }
    fused = _fused(classifier)
    if fused is not None:
        sides["forward, BatchNorm folded into convolutions"] = partial(_evaluate, fused, images)
    if not args.no_compile:
        compiled = cafe.create("cafe", classifier, source)
        compiled.classifier.backbone = torch.compile(compiled.classifier.backbone)  # type: ignore[assignment]
        sides["step, backbone compiled"] = partial(compiled, images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seconds = timing.in_turns(sides, args.repeats)
    print(f"{args.model}, {args.size}×{args.size}, B={args.batch}, {args.threads} threads, median of {args.repeats}\n")
    print("| what | time | against | time | ratio | |\n|---|---:|---|---:|---:|---|")
    for name in sides:
        base = name.partition(",")[0]
        if name != base:
            print(timing.line(name, seconds[name], base, seconds[base], ""))


def _with_sgd(classifier: SplitClassifier, source: cafe.SourceStats, **options: bool) -> cafe.Adapter:
    adapter = cafe.create("cafe", classifier, source)
    adapter.optimizer = torch.optim.SGD(adapter.moving(), lr=1e-3, momentum=0.8, **options)
    return adapter


def _evaluate(classifier: SplitClassifier, images: Tensor) -> None:
    with torch.no_grad():
        classifier(images)


def _fused(classifier: SplitClassifier) -> SplitClassifier | None:
    """A copy whose BatchNorm layers that follow a convolution directly are part of it; None where there are none."""
    found = copy.deepcopy(classifier).eval()
    count = 0
    for parent in list(found.modules()):
        children = list(parent.named_children())
        for (first, conv), (second, norm) in pairwise(children):
            # timm's BatchNormAct2d also applies the activation: it is no BatchNorm that could be left out.
            if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d and norm.num_features == conv.out_channels:
                setattr(parent, first, fuse_conv_bn_eval(conv, norm))
                setattr(parent, second, nn.Identity())
                count += 1
    return found if count else None


if __name__ == "__main__":
    main()
