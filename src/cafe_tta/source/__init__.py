"""Everything that is made at the training site, and taken to where the images come in.

`SOURCES` lists every kind of value that a method may need from the source domain. Adding one is a class in a file of
its own and a line here; `cafe-tta stats`, `adapt`, `bench` and `serve` then make, load and check it by themselves.
"""

import os
from collections.abc import Iterable

from cafe_tta import storage
from cafe_tta.options import require_known
from cafe_tta.source.activations import ActivationStats as ActivationStats
from cafe_tta.source.class_moments import ClassMoments as ClassMoments
from cafe_tta.source.fisher import FisherInformation as FisherInformation
from cafe_tta.source.histograms import SourceHistograms as SourceHistograms
from cafe_tta.source.images import ImageRecord as ImageRecord
from cafe_tta.source.images import SourceWarning as SourceWarning
from cafe_tta.source.images import agreed_record as agreed_record
from cafe_tta.source.reference import Reference as Reference
from cafe_tta.source.stats import FeatureStats as FeatureStats
from cafe_tta.source.stats import SourceStats as SourceStats
from cafe_tta.source.swag import Posterior as Posterior
from cafe_tta.source.swag import SwagCollector as SwagCollector
from cafe_tta.source.swag import recompute_batchnorm as recompute_batchnorm
from cafe_tta.source.value import SourceData as SourceData
from cafe_tta.source.value import SourceValue as SourceValue

_KINDS = (SourceStats, SourceHistograms, Posterior, FisherInformation, ActivationStats, ClassMoments, SourceData)
SOURCES: dict[str, type[SourceValue]] = {value.kind: value for value in _KINDS}


def source_kind(kind: str) -> type[SourceValue]:
    """The class of a kind of source value, or an error that lists the kinds."""
    require_known([kind], SOURCES, "the source domain", "value")
    return SOURCES[kind]


def load(path: str | os.PathLike[str]) -> SourceValue:
    """Reads a source value of any kind: its file knows which one it is."""
    file_kind = storage.kind_of(path)
    for value in SOURCES.values():
        if value.file_kind and value.file_kind == file_kind:
            return value.load(path)
    kinds = ", ".join(value.file_kind for value in SOURCES.values() if value.file_kind)
    raise storage.StorageError(f"{path}: expected a file of source values ({kinds}), but it holds {file_kind!r}")


def load_all(paths: Iterable[str | os.PathLike[str]]) -> dict[str, SourceValue]:
    """Source values by kind, from files of different kinds."""
    values: dict[str, SourceValue] = {}
    for path in paths:
        value = load(path)
        if value.kind in values:
            raise ValueError(f"expected one file for each kind of source value, but {path} is a second {value.kind}")
        values[value.kind] = value
    return values
