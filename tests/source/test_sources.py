"""A need is declared once: a toy value and a toy method run through every command without touching another file."""

import json
from dataclasses import dataclass

import pytest
import torch
from typer.testing import CliRunner

import cafe_tta as cafe
from cafe_tta import serve, source, storage
from cafe_tta.adapter import Adapter, Report
from cafe_tta.classifier import require_match
from cafe_tta.cli.app import app
from cafe_tta.source.value import SourceValue, images_of


@dataclass(frozen=True)
class MeanFeature(SourceValue):
    """The mean of the source features, and nothing else."""

    kind = "mean-feature"
    file_kind = "mean-feature"
    how_to_make = "make it with MeanFeature.fit(classifier, source_loader)"

    mean: torch.Tensor
    identity: dict

    @classmethod
    def fit(cls, classifier, loader):
        with torch.no_grad():
            features = torch.cat([classifier.backbone(images_of(batch)) for batch in loader])
        return cls(features.mean(0), classifier.identity())

    def save(self, path):
        return storage.write(path, self.file_kind, 1, {"mean": self.mean}, self.identity)

    @classmethod
    def load(cls, path):
        tensors, identity = storage.read(path, cls.file_kind, 1)
        return cls(tensors["mean"], identity)

    def check_belongs_to(self, classifier):
        require_match("mean feature", len(self.mean), self.identity, classifier)


class Recentre(Adapter):
    """Moves the mean of the features of a batch to the source's."""

    name = "recentre"
    needs = "mean-feature"
    presets = {"cifar": cafe.AdapterConfig()}  # noqa: RUF012

    def prepare(self, source):
        super().prepare(source)
        self.register_buffer("mean", source.mean, persistent=False)

    def answer(self, images):
        features, _ = self.features_and_logits(images)
        return self.classifier.head(features - features.mean(0) + self.mean), Report(len(images), stepped=True)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(source.SOURCES, MeanFeature.kind, MeanFeature)
    monkeypatch.setitem(cafe.METHODS, Recentre.name, Recentre)


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_toy_need_is_made_and_used_by_every_command(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("CAFE_TTA_CACHE", str(tmp_path / "cache"))
    model, value = tmp_path / "model/model.safetensors", tmp_path / "mean.safetensors"
    run(*("train", "--data", "digits:test", "--output", tmp_path / "model", "--epochs", 1, "--swag-epochs", 0))
    # stats makes it
    run("stats", "--kind", "mean-feature", "--model", model, "--data", "digits:test", "--output", value)
    assert isinstance(source.load(value), MeanFeature)
    # adapt
    asked = ("--model", model, "--method", "recentre", "--source", value)
    run("adapt", *asked, "--data", "digits:test", "--output", tmp_path / "out", "--measure", 0)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["steps"] == summary["batches"] > 0 and list(summary["settings"]["source"]) == ["mean-feature"]
    # bench computes it by itself, once
    options = ("--model", model, "--source-limit", 64, "--limit", 20, "--seeds", 1, "--no-frechet")
    run("bench", "mixed", "--methods", "source,recentre", *options, "--output", tmp_path / "bench")
    records = [json.loads(line) for line in (tmp_path / "bench/records.jsonl").read_text().splitlines()]
    assert [record["method"] for record in records] == ["source", "recentre"]
    assert records[1]["needs"] == "mean-feature" and records[1]["steps"] > 0
    assert isinstance(source.load(tmp_path / "bench/source/mean-feature.safetensors"), MeanFeature)
    # serve
    assert "all is well" in run("serve", "--check", *asked)
    built = serve.build(serve.load_settings({"model": model, "method": "recentre", "source": [value]}))
    assert isinstance(built.service, serve.Service)


@pytest.mark.parametrize("kind", ["stats", "histograms", "posterior"])
def test_a_file_knows_its_kind(kind, request, tmp_path):
    made = request.getfixturevalue("source").needs[kind]
    made.save(tmp_path / "value.safetensors")
    loaded = source.load(tmp_path / "value.safetensors")
    assert type(loaded) is type(made) is source.SOURCES[kind] and loaded.kind == kind


def test_files_that_hold_no_source_value_or_the_same_kind_twice_are_refused(request, tmp_path):
    values = request.getfixturevalue("source").needs
    storage.write(tmp_path / "state", "adapter-state", 1, {"x": torch.zeros(1)}, {})
    with pytest.raises(storage.StorageError, match="expected a file of source values .*, but it holds 'adapter-state'"):
        source.load(tmp_path / "state")
    with pytest.raises(FileNotFoundError, match="no file at"):
        source.load(tmp_path / "none")
    for name in ("a", "b"):
        values["stats"].save(tmp_path / name)
    values["posterior"].save(tmp_path / "c")
    assert list(source.load_all([tmp_path / "a", tmp_path / "c"])) == ["stats", "posterior"]
    with pytest.raises(ValueError, match="one file for each kind of source value, but .*b is a second stats"):
        source.load_all([tmp_path / "a", tmp_path / "b"])


def test_an_unknown_need_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="has no value 'stat'; did you mean 'stats'.; values: stats, histograms, "):
        source.source_kind("stat")
