"""Adapts a model to images from the field, then writes it as an ordinary one: weights, and ONNX where it is installed.

    python examples/export_model.py

The exported model has the class of the one that was split, and adapts no more. Keep it where every answer has to be
reproducible, or where only a runtime without PyTorch is available.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

import cafe_tta as cafe
from cafe_tta import corruptions, data, models
from cafe_tta.source.train import TrainConfig
from cafe_tta.source.train_folder import TrainingRun


def main(folder: Path = Path("exported")) -> None:
    TrainingRun("digits:train", folder, config=TrainConfig(epochs=8, swag_epochs=0)).train()  # or bring your own
    model = models.load_classifier(models.ModelOptions(folder / "model.safetensors"))
    train, test = data.load("digits:train"), data.load("digits:test")
    batches = model.preprocessing(train.images(range(len(train)))).split(128)
    source = cafe.FeatureStats.fit(model.classifier, batches).group()

    field = corruptions.corrupt(test.images(range(len(test))), "brightness", severity=3, seed=0)
    images, labels = model.preprocessing(field), torch.as_tensor(test.labels)
    adapter = cafe.CAFe(model.classifier, source)  # all images have one corruption: nothing to unmix
    for batch in images.split(128):
        adapter(batch)

    exported = adapter.export().eval()
    with torch.no_grad():
        before, after = model.classifier(images), exported(images)
    print(f"right before {100 * (before.argmax(1) == labels).float().mean():.0f} %")
    print(f"right after {100 * (after.argmax(1) == labels).float().mean():.0f} %, as {type(exported).__name__}")
    torch.save(exported.state_dict(), folder / "adapted.pth")
    if find_spec("onnx"):
        names = {"input_names": ["images"], "output_names": ["logits"]}
        axes = {"images": {0: "batch"}, "logits": {0: "batch"}}
        torch.onnx.export(exported, (images[:2],), folder / "adapted.onnx", dynamic_axes=axes, dynamo=False, **names)
    else:
        print("for ONNX: pip install onnx")


if __name__ == "__main__":
    main()
