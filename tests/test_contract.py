"""Every method passes every check, with its defaults and with its options."""

import pytest
import torch

import cafe_tta as cafe
from cafe_tta import checks

from .loose import LOOSE

# Settings that do something, soon and in little time.
SETTINGS = LOOSE | {
    "rdumb": {**LOOSE["rdumb"], "reset_every": 2},
    "cotta": {"augmentations": 2},
    "rotta": {"capacity": 16},
}
BATCHNORM_NOT = ("moetta",)  # has nothing to do where there is only BatchNorm
WITHOUT_BATCHNORM = [name for name in cafe.METHODS if name not in ("adabn", "unmix", "unmix-tns")]
VARIANTS = [
    *((name, SETTINGS.get(name, {})) for name in cafe.METHODS if name not in BATCHNORM_NOT),
    ("cafe", {"max_entropy": 0.99, "reset_every": 2}),
    ("cafe", {"normalisation": "slow"}),
    ("tent", {"normalisation": "unmix-tns"}),
    ("roid", {"normalisation": "unmix"}),
    ("sar", {"max_entropy": 1.0, "quirks": "official", "optimizer": "adam"}),
    ("adabn", {"momentum": None}),
    ("adabn", {"prior": 16}),
    ("tent", {"optimizer": "adam"}),
    ("tent", {"normalisation": "source"}),
    ("cafe", {"answer": "after"}),
    ("cafe", {"answer": "after-eval"}),
    ("cafe", {"normalisation": "source"}),
    ("cafe", {"normalisation": "blend", "answer": "after"}),
    ("cafe", {"normalisation": "unmix"}),
    ("cafe-plus", {"normalisation": "unmix", "answer": "after-eval"}),
    ("cafe", {"parameters": "norm"}),
    ("cafe", {"samples_per_dim": 20}),
    ("cafe", {"samples_per_dim": 20, "memory": False}),
    ("infomax", {"optimizer": "adam", "normalisation": "blend"}),
    ("cafe", {"adapt_from": "3"}),
    ("cafe", {"every": 2}),
    ("cafe", {"gate": True}),
    ("bacs", {"ensemble_size": 1}),
    ("fr", {"temperature": 0.05}),
]


def _id(variant):
    name, options = variant
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


@pytest.mark.parametrize("variant", VARIANTS, ids=_id)
@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
def test_method_keeps_the_contract(check, variant, source):
    name, options = variant

    def make_adapter():
        return cafe.create(name, source.classifier, source.needs[cafe.METHODS[name].needs or "stats"], **options)

    check(make_adapter, source.corrupted)


# Oracles of the others run on such a network, too.
@pytest.mark.parametrize("name", [n for n in WITHOUT_BATCHNORM if cafe.METHODS[n].in_tables or n in BATCHNORM_NOT])
@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
def test_method_keeps_the_contract_without_batchnorm(check, name, source_without_batchnorm):
    source = source_without_batchnorm
    needs = source.needs[cafe.METHODS[name].needs]
    check(lambda: cafe.create(name, source.classifier, needs, **SETTINGS.get(name, {})), source.corrupted)


@pytest.mark.parametrize("name", [name for name, kind in cafe.METHODS.items() if kind.adapts])
def test_the_contract_is_kept_by_a_method_that_steps(name, source, source_without_batchnorm):
    """A method that learns nothing from these images would keep it too."""
    fitting = [(source, name not in BATCHNORM_NOT), (source_without_batchnorm, name in WITHOUT_BATCHNORM)]
    for made in (made for made, fits in fitting if fits):
        adapter = cafe.create(name, made.classifier, made.needs[cafe.METHODS[name].needs], **SETTINGS.get(name, {}))
        for images in (made.corrupted, made.corrupted.flip(0)):
            adapter(torch.cat([images, images.flip(3)]))  # 96: cafe-plus takes one step for 64
        assert adapter.counters.steps == 2, adapter.report.reason


def test_checks_notice_a_method_that_breaks_the_contract(source):
    class Forgetful(cafe.Infomax):
        """Keeps its weights through a reset, and its images for ever."""

        name = "forgetful"

        def reset(self):
            if not hasattr(self, "optimizer"):
                super().reset()
                self.seen = torch.nn.Buffer(torch.zeros(0))

        def loss(self, features, logits):
            self.seen = torch.nn.Buffer(torch.cat([self.seen, features.detach().flatten()]))
            return super().loss(features, logits)

    def make_adapter():
        return Forgetful(source.classifier)

    for check in (checks.check_reset_is_exact, checks.check_memory_is_bounded):
        with pytest.raises(AssertionError):
            check(make_adapter, source.corrupted)
