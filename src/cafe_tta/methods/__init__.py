"""Every method by name. Adding one is a file in this folder and a line in `METHODS`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cafe_tta import plugins, storage
from cafe_tta.adapter import STATE_KIND, STATE_VERSION, Adapter
from cafe_tta.classifier import SplitClassifier, describe_difference, require_classifier
from cafe_tta.methods.actmad import ActMAD as ActMAD
from cafe_tta.methods.actmad import ActMADConfig as ActMADConfig
from cafe_tta.methods.adabn import AdaBN as AdaBN
from cafe_tta.methods.adabn import AdaBNConfig as AdaBNConfig
from cafe_tta.methods.bacs import BACS as BACS
from cafe_tta.methods.bacs import BACSConfig as BACSConfig
from cafe_tta.methods.cafe import CAFe as CAFe
from cafe_tta.methods.cafe import CAFeConfig as CAFeConfig
from cafe_tta.methods.cafe_dimwise import CAFeDimwise as CAFeDimwise
from cafe_tta.methods.cafe_no_infomax import CAFeNoInfomax as CAFeNoInfomax
from cafe_tta.methods.cafe_plus import CAFePlus as CAFePlus
from cafe_tta.methods.cafe_plus import CAFePlusConfig as CAFePlusConfig
from cafe_tta.methods.cmf import CMF as CMF
from cafe_tta.methods.cmf import CMFConfig as CMFConfig
from cafe_tta.methods.cotta import CoTTA as CoTTA
from cafe_tta.methods.cotta import CoTTAConfig as CoTTAConfig
from cafe_tta.methods.dann import DANN as DANN
from cafe_tta.methods.dann import DANNConfig as DANNConfig
from cafe_tta.methods.deyo import DeYO as DeYO
from cafe_tta.methods.deyo import DeYOConfig as DeYOConfig
from cafe_tta.methods.eata import EATA as EATA
from cafe_tta.methods.eata import EATAConfig as EATAConfig
from cafe_tta.methods.eta import ETA as ETA
from cafe_tta.methods.eta import ETAConfig as ETAConfig
from cafe_tta.methods.fr import FR as FR
from cafe_tta.methods.fr import FRConfig as FRConfig
from cafe_tta.methods.infomax import Infomax as Infomax
from cafe_tta.methods.lame import LAME as LAME
from cafe_tta.methods.lame import LAMEConfig as LAMEConfig
from cafe_tta.methods.moetta import MoETTA as MoETTA
from cafe_tta.methods.moetta import MoETTAConfig as MoETTAConfig
from cafe_tta.methods.neo import NEO as NEO
from cafe_tta.methods.neo import NEOConfig as NEOConfig
from cafe_tta.methods.rdumb import RDumb as RDumb
from cafe_tta.methods.rdumb import RDumbConfig as RDumbConfig
from cafe_tta.methods.roid import ROID as ROID
from cafe_tta.methods.roid import ROIDConfig as ROIDConfig
from cafe_tta.methods.rotta import RoTTA as RoTTA
from cafe_tta.methods.rotta import RoTTAConfig as RoTTAConfig
from cafe_tta.methods.sar import SAR as SAR
from cafe_tta.methods.sar import SARConfig as SARConfig
from cafe_tta.methods.source import SourceOnly as SourceOnly
from cafe_tta.methods.t3a import T3A as T3A
from cafe_tta.methods.t3a import T3AConfig as T3AConfig
from cafe_tta.methods.tent import Tent as Tent
from cafe_tta.methods.tent import TentConfig as TentConfig
from cafe_tta.methods.ttac import TTAC as TTAC
from cafe_tta.methods.ttac import TTACConfig as TTACConfig
from cafe_tta.methods.unmix import Unmix as Unmix
from cafe_tta.methods.unmix import UnmixConfig as UnmixConfig
from cafe_tta.methods.unmix_tns import UnMixTNS as UnMixTNS
from cafe_tta.methods.unmix_tns import UnMixTNSConfig as UnMixTNSConfig
from cafe_tta.methods.zerosiam import ZeroSiam as ZeroSiam
from cafe_tta.methods.zerosiam import ZeroSiamConfig as ZeroSiamConfig
from cafe_tta.options import describe, require_known
from cafe_tta.source import SourceValue, source_kind
from cafe_tta.styles import StyleStats

METHODS: dict[str, type[Adapter]] = {
    "source": SourceOnly,
    "adabn": AdaBN,
    "t3a": T3A,
    "tent": Tent,
    "bacs": BACS,
    "fr": FR,
    "infomax": Infomax,
    "cafe-no-infomax": CAFeNoInfomax,
    "cafe-dimwise": CAFeDimwise,
    "cafe": CAFe,
    "cafe-plus": CAFePlus,
    "unmix": Unmix,
    "dann": DANN,
    "eta": ETA,
    "eata": EATA,
    "rdumb": RDumb,
    "sar": SAR,
    "deyo": DeYO,
    "roid": ROID,
    "cmf": CMF,
    "unmix-tns": UnMixTNS,
    "zerosiam": ZeroSiam,
    "lame": LAME,
    "neo": NEO,
    "cotta": CoTTA,
    "rotta": RoTTA,
    "ttac": TTAC,
    "actmad": ActMAD,
    "moetta": MoETTA,
}


def method_name(text: str) -> str:
    """The key in `METHODS` of a method by its name, or by package.module:Class, which is then added."""
    name = plugins.add("methods", text, METHODS, _as_method)
    if name is None:
        raise plugins.unknown("method", "methods", text, METHODS)
    return name


def method(name: str) -> type[Adapter]:
    """The class of a method, or an error that lists what there is."""
    return METHODS[method_name(name)]


def _as_method(name: str, found: Any) -> type[Adapter]:
    if not isinstance(found, type) or not issubclass(found, Adapter):
        kind = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        raise TypeError(f"expected {name} to be a method, a subclass of cafe_tta.Adapter, but got {kind}")
    if not hasattr(found, "name"):
        found.name = name
    return found


def configure(name: str, preset: str | None = None, **options: Any) -> Any:
    """The configuration of a method: a preset, or its defaults, with some options changed."""
    kind = method(name)
    if preset is not None and preset not in kind.presets:
        raise ValueError(f"{name} has no preset {preset!r}; choose from: {', '.join(kind.presets) or 'none'}")
    return kind.configure(None if preset is None else kind.presets[preset], **options)


def knowing_pixels(config: Any, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Options that know how the pixels were normalised, where a method augments images and was not told."""
    if getattr(config, "pixel_mean", ...) is not None:
        return config
    return replace(config, pixel_mean=list(mean), pixel_std=list(std))


def create(
    name: str,
    classifier: SplitClassifier,
    source: Any = None,
    *,
    preset: str | None = None,
    styles: StyleStats | None = None,
    **options: Any,
) -> Adapter:
    """An adapter by the name of its method. `source` is what the method `needs`; the others ignore it.

    With `normalisation="unmix"` a method also takes the `styles` of the source images, `SourceStats.styles`; those of
    `source` where it is a `SourceStats`.

    >>> import torch
    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> create("tent", classifier, preset="cifar", lr=1e-4).config.lr
    0.0001
    """
    config = configure(name, preset, **options)
    return method(name)(classifier, source, config, styles=styles)


def load_adapter(
    path: str | os.PathLike[str], classifier: SplitClassifier, source: Any = None, styles: StyleStats | None = None
) -> Adapter:
    """The adapter that `adapter.save` wrote, from one file: method, options, source values, and all that it learnt.

    `classifier` is the one that it was made of, unchanged. `source` is only needed where the file has none: a loader of
    labelled images, or a file that was saved without it. So are `styles`, as in `create`.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from cafe_tta import split_classifier
    >>> classifier = split_classifier(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)))
    >>> adapter, images = create("tent", classifier, lr=0.01), torch.rand(8, 3, 2, 2)
    >>> logits = adapter(images)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = adapter.save(f"{folder}/state.safetensors")
    ...     again = load_adapter(f"{folder}/state.safetensors", classifier)
    >>> again.config.lr, torch.equal(again(images), adapter(images))
    (0.01, True)
    """
    require_classifier(classifier)
    kept = SavedState.read(path)
    if difference := describe_difference(kept.meta["classifier"], classifier.identity()):
        raise ValueError(f"{path} does not belong to this classifier: {difference}")
    kind = method(kept.method)
    require_known(kept.meta["config"], [described.name for described in describe(kind.Config)], kind.name)
    source = kept.source if source is None else source
    styles = kept.styles if styles is None else styles
    adapter = kind(classifier, source, kind.Config(**kept.meta["config"]), styles=styles)
    adapter.load(path)
    return adapter


@dataclass(frozen=True)
class SavedState:
    """What `adapter.save` wrote: the method, its options, and the values from the source domain."""

    method: str
    meta: Mapping[str, Any]
    source: SourceValue | None
    styles: StyleStats | None

    @staticmethod
    def read(path: str | os.PathLike[str]) -> "SavedState":
        tensors, meta = storage.read(path, STATE_KIND, STATE_VERSION)
        source, kept = None, meta.get("source")
        if kept is not None:
            own = {name.removeprefix("source."): t for name, t in tensors.items() if name.startswith("source.")}
            source = source_kind(kept["kind"]).from_content(own, kept["meta"])
        styles = StyleStats(tensors["styles.mean"], tensors["styles.cov"]) if "styles.mean" in tensors else None
        return SavedState(meta["method"], meta, source, styles)
