"""Copies of the adapter that only answer: the source model, and the two that are published in turns."""

import copy
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter

SOURCE_VERSION = 0
CHUNK = 16  # images that work in the background passes at a time: who wants an answer need not wait for more


def for_answering(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of an adapter's state that answers depend on; not an optimiser's memory."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("classifier.", "adapter."))}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class Replica:
    """An adapter in evaluation mode. Its weights change only between two passes, never during one."""

    def __init__(self, adapter: Adapter) -> None:
        source_state = adapter._source_state
        adapter._source_state = {}  # constant: shared, not copied
        try:
            self._adapter = copy.deepcopy(adapter)
        finally:
            adapter._source_state = source_state
        self._adapter._source_state = source_state
        self._adapter.reset()
        self._lock = threading.Lock()
        self.version = SOURCE_VERSION

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes the weights of a snapshot, once a running pass has ended."""
        with self._lock:
            self._adapter.set_state(copied(for_answering(tensors)))
            self.version = version

    def __call__(self, images: Tensor) -> tuple[int, Tensor, Tensor]:
        """The version that answers, features (B, D) and logits (B, C)."""
        with self._lock:  # the layers keep what they received during a pass: one at a time
            features, logits = self._adapter.features_and_logits(images)
            return self.version, features, logits

    def in_the_background(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits, a few images at a time."""
        parts = [self(part)[1:] for part in images.split(CHUNK)]
        return torch.cat([features for features, _ in parts]), torch.cat([logits for _, logits in parts])


class Published:
    """The snapshot that answers, and beside it a copy to write the next one to. Who asks never gets a mixture."""

    def __init__(self, adapter: Adapter) -> None:
        self._front, self._back = Replica(adapter), Replica(adapter)

    @property
    def version(self) -> int:
        return self._front.version

    @property
    def front(self) -> Replica:
        return self._front

    def show(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes the copy that nobody reads, and has it change places with the other: one assignment."""
        self._back.load(version, tensors)
        self._front, self._back = self._back, self._front
