"""torchvision, also where its compiled operators do not load.

torchvision's wheel on PyPI is built against torch with CUDA. Beside a CPU build of torch its library of operators does
not load, and `import torchvision` stops with "operator torchvision::nms does not exist", although its models and
transforms are plain Python. The two operators that its import asks for are declared here, without an implementation:
enough to import torchvision, and timm, which imports it. `import cafe_tta` does so, too. Detection models, which need
the operators, still do not run.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from cafe_tta._install import missing

_OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # the declarations last as long as this object


def repair() -> None:
    """Makes `import torchvision` and `import timm` work from here on, where they would not, without importing them."""
    if "torchvision" in sys.modules or (spec := importlib.util.find_spec("torchvision")) is None or not spec.origin:
        return
    libraries = [path for path in Path(spec.origin).parent.glob("_C*") if path.suffix in (".so", ".pyd", ".dylib")]
    try:
        for library in libraries:
            torch.ops.load_library(str(library))  # as torchvision does, a moment later
    except OSError:
        libraries = []
    if not libraries:
        _declare_operators()


def import_torchvision() -> ModuleType:
    """torchvision, made importable if need be. Call it before `import timm` too."""
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise missing("this model", error, "models") from error
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
