"""The adapted model as an ONNX file, for runtimes that know no PyTorch.

    python examples/export_onnx.py adapted.onnx

needs `pip install onnx onnxscript`. The file holds an ordinary model with the weights and statistics that the adapter
has learnt: it answers as `adapter.predict` does, and adapts no more.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

import cafe_tta as cafe
from cafe_tta import corruptions, data
from cafe_tta.bench.embedded import embedded_digits


def export(adapter: cafe.Adapter, images: Tensor, path: Path) -> None:
    """Writes the adapted model to a file. `images` is a batch such as the model will see, of two images or more."""
    program = torch.onnx.export(
        adapter.export(),
        (images,),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),  # any number of images
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(path)


def main(path: Path) -> None:
    digits = embedded_digits(
        say=print
    )  # yours: cafe.split_classifier(model), cafe.SourceStats.load("stats.safetensors")
    adapter = cafe.create("cafe", digits.classifier, digits.stats)
    foggy = corruptions.corrupt(data.load("digits:test").images(range(512)), "fog", severity=3)
    for images in digits.model.preprocessing(foggy).split(64):
        adapter(images)
    export(adapter, images, path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
