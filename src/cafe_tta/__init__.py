"""cafe-tta: keeps image classifiers accurate on corrupted images, without labels and without source data."""

from cafe_tta import checks as checks
from cafe_tta import corruptions as corruptions
from cafe_tta import distributed as distributed
from cafe_tta import losses as losses
from cafe_tta import metrics as metrics
from cafe_tta import ranks as ranks
from cafe_tta._version import __version__ as __version__
from cafe_tta.adapter import Adapter as Adapter
from cafe_tta.adapter import AdapterConfig as AdapterConfig
from cafe_tta.adapter import Report as Report
from cafe_tta.adapter import StepRefused as StepRefused
from cafe_tta.classifier import SplitClassifier as SplitClassifier
from cafe_tta.classifier import split_classifier as split_classifier
from cafe_tta.distributed import RankError as RankError
from cafe_tta.gradient import GradientAdapter as GradientAdapter
from cafe_tta.gradient import StepConfig as StepConfig
from cafe_tta.methods import BACS as BACS
from cafe_tta.methods import DANN as DANN
from cafe_tta.methods import FR as FR
from cafe_tta.methods import METHODS as METHODS
from cafe_tta.methods import T3A as T3A
from cafe_tta.methods import AdaBN as AdaBN
from cafe_tta.methods import AdaBNConfig as AdaBNConfig
from cafe_tta.methods import BACSConfig as BACSConfig
from cafe_tta.methods import CAFe as CAFe
from cafe_tta.methods import CAFeConfig as CAFeConfig
from cafe_tta.methods import CAFeDimwise as CAFeDimwise
from cafe_tta.methods import CAFeNoInfomax as CAFeNoInfomax
from cafe_tta.methods import CAFePlus as CAFePlus
from cafe_tta.methods import CAFePlusConfig as CAFePlusConfig
from cafe_tta.methods import DANNConfig as DANNConfig
from cafe_tta.methods import FRConfig as FRConfig
from cafe_tta.methods import Infomax as Infomax
from cafe_tta.methods import SourceOnly as SourceOnly
from cafe_tta.methods import T3AConfig as T3AConfig
from cafe_tta.methods import Tent as Tent
from cafe_tta.methods import TentConfig as TentConfig
from cafe_tta.methods import Unmix as Unmix
from cafe_tta.methods import UnmixConfig as UnmixConfig
from cafe_tta.methods import create as create
from cafe_tta.methods import load_adapter as load_adapter
from cafe_tta.models import _torchvision
from cafe_tta.monitor import Monitor as Monitor
from cafe_tta.monitor import drift as drift
from cafe_tta.source import SOURCES as SOURCES
from cafe_tta.source import FeatureStats as FeatureStats
from cafe_tta.source import Posterior as Posterior
from cafe_tta.source import Reference as Reference
from cafe_tta.source import SourceHistograms as SourceHistograms
from cafe_tta.source import SourceStats as SourceStats
from cafe_tta.source import SourceWarning as SourceWarning
from cafe_tta.source import SwagCollector as SwagCollector

_torchvision.repair()
