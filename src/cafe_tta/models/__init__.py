"""Models by name or from files, and the preprocessing of their images.

>>> from cafe_tta import models
>>> model = models.build("cafe:digits-resnet", num_classes=10)
>>> preprocessing = models.default_preprocessing("cafe:digits-resnet", model)
>>> preprocessing.size
32
"""

from cafe_tta.models._torchvision import import_torchvision as import_torchvision
from cafe_tta.models.files import LoadedModel as LoadedModel
from cafe_tta.models.files import load as load
from cafe_tta.models.files import save as save
from cafe_tta.models.names import build as build
from cafe_tta.models.names import default_preprocessing as default_preprocessing
from cafe_tta.models.names import trained_models as trained_models
from cafe_tta.models.options import DEVICES as DEVICES
from cafe_tta.models.options import Model as Model
from cafe_tta.models.options import ModelOptions as ModelOptions
from cafe_tta.models.options import channels_last as channels_last
from cafe_tta.models.options import choose_device as choose_device
from cafe_tta.models.options import load_classifier as load_classifier
from cafe_tta.models.preprocessing import CIFAR as CIFAR
from cafe_tta.models.preprocessing import IMAGENET as IMAGENET
from cafe_tta.models.preprocessing import Preprocessing as Preprocessing
