"""Models by name or from files, and the preprocessing of their images.

>>> from cafe_tta import models
>>> model = models.build("cafe:digits-resnet", num_classes=10)
>>> preprocessing = models.default_preprocessing("cafe:digits-resnet", model)
>>> preprocessing.size
32
"""

from cafe_tta.models._torchvision import import_torchvision
from cafe_tta.models.files import LoadedModel, load, save
from cafe_tta.models.names import build, default_preprocessing
from cafe_tta.models.options import DEVICES, Model, ModelOptions, channels_last, choose_device, load_classifier
from cafe_tta.models.preprocessing import IMAGENET, Preprocessing

__all__ = [
    "DEVICES",
    "IMAGENET",
    "LoadedModel",
    "Model",
    "ModelOptions",
    "Preprocessing",
    "build",
    "channels_last",
    "choose_device",
    "default_preprocessing",
    "import_torchvision",
    "load",
    "load_classifier",
    "save",
]
