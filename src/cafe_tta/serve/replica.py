"""A copy of the adapter that only answers: one of the two that are published in turns, or the source model."""

import copy
import threading
from collections.abc import Mapping

from torch import Tensor

from cafe_tta.adapter import Adapter

SOURCE_VERSION = 0


def for_answering(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of an adapter's state that answers depend on; not an optimiser's memory."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("classifier.", "adapter."))}


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
            self._adapter.set_state({name: tensor.clone() for name, tensor in for_answering(tensors).items()})
            self.version = version

    def __call__(self, images: Tensor) -> tuple[int, Tensor, Tensor]:
        """The version that answers, features (B, D) and logits (B, C)."""
        with self._lock:  # the layers keep what they received during a pass: one at a time
            features, logits = self._adapter.features_and_logits(images)
            return self.version, features, logits
