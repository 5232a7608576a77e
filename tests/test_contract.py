"""Every method passes every check, with its defaults and with its options."""

import pytest
import torch

import cafe_tta as cafe
from cafe_tta import checks

VARIANTS = [
    *((name, {}) for name in cafe.METHODS),
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
        return cafe.create(name, source.classifier, source.needs[cafe.METHODS[name].needs], **options)

    check(make_adapter, source.corrupted)


@pytest.mark.parametrize("name", [name for name in cafe.METHODS if name not in ("adabn", "unmix")])
@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: check.__name__)
def test_method_keeps_the_contract_without_batchnorm(check, name, source_without_batchnorm):
    source = source_without_batchnorm
    needs = source.needs[cafe.METHODS[name].needs]
    check(lambda: cafe.create(name, source.classifier, needs), source.corrupted)


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
