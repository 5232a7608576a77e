"""What a run costs: images through the network, forward and backward, and memory. Both are measured, not declared."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from cafe_tta.classifier import SplitClassifier

_PROC = Path("/proc/self")
_FORGET_PEAK = "5"  # of /proc/PID/clear_refs: see proc(5)


class Passes:
    """Counts the images that go through the networks of an adapter, while `counting`.

    An image that goes through twice, or through two networks of an ensemble, counts twice. `backward` counts the images
    of those passes through which a gradient came back.

    >>> from cafe_tta import create, split_classifier
    >>> adapter = create("infomax", split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 3))))
    >>> passes = Passes(adapter)
    >>> with passes.counting():
    ...     logits = adapter(torch.rand(5, 3, 2, 2))
    >>> passes.forward, passes.backward
    (5, 5)
    """

    def __init__(self, adapter: nn.Module) -> None:
        self.forward = self.backward = 0
        networks = [module for module in adapter.modules() if isinstance(module, SplitClassifier)]
        self._backbones = {id(network.backbone) for network in networks}
        self._size: int | None = None  # images of the pass under way, until an output of it has a gradient to come

    @contextmanager
    def counting(self) -> Iterator[None]:
        # Hooks on all modules: methods replace layers, and a hook on a layer would be copied and saved with it.
        hooks = (register_module_forward_pre_hook(self._begin), register_module_forward_hook(self._end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._backbones:
            size = len(args[0])
            self.forward += size
            self._size = size if torch.is_grad_enabled() else None

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Watches the first output of a pass that depends on what moves: every gradient of the pass ends there."""
        if self._size is not None and isinstance(output, Tensor) and output.requires_grad:
            size, self._size = self._size, None

            def count(gradient: Tensor) -> None:
                self.backward += size

            output.register_hook(count)
        if id(module) in self._backbones:
            self._size = None


class Memory:
    """Memory from the moment this is made, in MB: on the GPU if there is one, else resident memory of the process.

    Everything is None where the system cannot forget an earlier peak (it can on Linux, and on GPUs).
    """

    def __init__(self) -> None:
        gc.collect()
        self._before: float | None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / 2**20
        else:
            _return_freed_memory()
            self._before = _resident("VmRSS") if _forget_peak() else None

    @property
    def peak(self) -> float | None:
        """The most in use since then: network, images and libraries included."""
        if self._before is None:
            return None
        return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else _resident("VmHWM")

    @property
    def added(self) -> float | None:
        """The peak, less what was in use at the beginning: activations, gradients and what a method keeps."""
        peak = self.peak
        return None if peak is None or self._before is None else max(0.0, peak - self._before)


def _return_freed_memory() -> None:
    """Gives back what earlier runs freed: else this run would use it, and seem to need none."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _forget_peak() -> bool:
    try:
        (_PROC / "clear_refs").write_text(_FORGET_PEAK)
    except OSError:
        return False
    return True


def _resident(name: str) -> float | None:
    with suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
    return None
