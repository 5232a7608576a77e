"""The former name of `cafe_tta.distributed`, which goes with the next release."""

import warnings
from typing import Any

from cafe_tta import distributed


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(distributed, name):
        raise AttributeError(f"module `cafe_tta.ranks` has no attribute `{name}`; see `cafe_tta.distributed`")
    warnings.warn(
        f"write `cafe_tta.distributed.{name}` instead of `cafe_tta.ranks.{name}`", DeprecationWarning, stacklevel=2
    )
    return getattr(distributed, name)
