"""torchvision, also where its compiled operators do not load.

torchvision's wheel on PyPI is built against torch with CUDA. Beside a CPU build of torch its library of operators does
not load, and `import torchvision` stops with "operator torchvision::nms does not exist", although its models and
transforms are plain Python. The two operators that its import asks for are declared here, without an implementation:
enough to import torchvision, and timm, which imports it. Detection models, which need them, still do not run.
"""

import importlib
import sys
from types import ModuleType

import torch

_OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # the declarations last as long as this object


def import_torchvision() -> ModuleType:
    """torchvision, made importable if need be. Call it before `import timm` too."""
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ImportError('torchvision is not installed; install it with: pip install "cafe-tta[models]"') from error
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    _declare_operators()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # halves of the import that failed
    return importlib.import_module("torchvision")


def _declare_operators() -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")  # "DEF" would claim the name for us alone
    for name, schema in _OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            _library.define(schema)
