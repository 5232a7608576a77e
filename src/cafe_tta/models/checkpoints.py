"""State dicts in files that `torch.save` wrote, read without executing code from them."""

import argparse
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
# Where training scripts put the state dict, averaged weights first: those are what their authors evaluate.
CONTAINERS = ("state_dict_ema", "ema", "state_dict", "model_state_dict", "model")


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, alone in its file or inside a checkpoint; see `CONTAINERS`."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise ValueError(
            f"{path}: this torch, {torch.__version__}, can be made to execute code by a file that it reads with "
            "weights_only=True; upgrade to torch 2.6, or convert the weights to safetensors"
        )
    found = _state_dict(_load(path), path)
    tensors = {str(name): value.detach() for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        names = ", ".join(map(str, list(found)[:8])) or "nothing"
        raise ValueError(
            f"{path} holds {names}, but no weights; expected a state dict, or one under {', '.join(CONTAINERS)}"
        )
    return tensors


def without_prefix(tensors: Mapping[str, Tensor], expected: Collection[str]) -> dict[str, Tensor]:
    """The tensors without what wrappers (DataParallel, torch.compile, Lightning) wrote before all of their names.

    >>> wrapped = {"module._orig_mod.fc.weight": torch.zeros(1), "module._orig_mod.fc.bias": torch.zeros(1)}
    >>> list(without_prefix(wrapped, ["fc.weight", "fc.bias"]))
    ['fc.weight', 'fc.bias']
    """
    stripped = dict(tensors)
    while stripped and not any(name in expected for name in stripped):
        prefix, dot, _ = next(iter(stripped)).partition(".")
        if not dot or not all(name.startswith(prefix + dot) for name in stripped):
            return dict(tensors)
        stripped = {name[len(prefix + dot) :]: tensor for name, tensor in stripped.items()}
    return stripped


def _load(path: Path) -> Any:
    # Arguments and numbers that training scripts keep beside the weights; neither can do anything.
    harmless: list[Any] = [argparse.Namespace, *_numpy_scalars()]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(harmless):
            warnings.simplefilter("ignore")  # about TorchScript, which is refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways
        text, new = str(error), _free(path)
        if "TorchScript" in text:
            raise ValueError(
                f"{path} is a TorchScript archive, not a state dict; write its weights to a new file: "
                f'torch.save(torch.jit.load("{path}").state_dict(), "{new}")'
            ) from None
        if named := re.search(r"GLOBAL (\S+) was not an allowed global", text):
            raise ValueError(
                f"{path} holds a {named[1]}: a whole model, or other objects beside the weights, and loading those can "
                "execute code. If you trust the file, write its weights to a new one, where its code can be imported: "
                f'loaded = torch.load("{path}", weights_only=False); torch.save(loaded.state_dict(), "{new}"), or '
                'loaded["state_dict"] where it is a dictionary'
            ) from None
        raise ValueError(
            f"{path} is not a whole file that torch.save wrote ({type(error).__name__}); restore or make it again"
        ) from error


def _numpy_scalars() -> list[Any]:
    """What a pickled numpy number consists of; older files call its function by an older name."""
    import numpy as np

    scalar = np.float64(0).__reduce__()[0]
    kinds = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.int32, np.bool_)]
    return [scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *kinds]


def _state_dict(loaded: Any, path: Path) -> Mapping[Any, Any]:
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}; expected a state dict: the weights by name")
    inside = [name for name in CONTAINERS if isinstance(loaded.get(name), Mapping) and loaded[name]]
    if not inside:
        return loaded
    if len(inside) > 1:
        others = ", ".join(f"`{name}`" for name in inside[1:])
        warnings.warn(f"{path}: the weights of `{inside[0]}` are used, not those of {others}", stacklevel=2)
    return _state_dict(loaded[inside[0]], path)


def _free(path: Path) -> Path:
    """A file name beside `path` that nothing has yet."""
    names = (path.with_name(f"{path.stem}-weights{number or ''}.pth") for number in range(1000))
    return next(name for name in names if not name.exists())
