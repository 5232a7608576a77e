import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.rich_utils
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from cafe_tta import METHODS, FeatureStats, SourceStats, corruptions, create, data, models, split_classifier, storage
from cafe_tta._install import libraries
from cafe_tta.adapter import Adapter
from cafe_tta.cli import app, console
from cafe_tta.methods import load_adapter
from cafe_tta.methods.choice import MethodOptions
from cafe_tta.models.digits_resnet import DigitsResNet
from cafe_tta.options import Described, _Rule
from cafe_tta.runs.measure import Followed, Measurement
from cafe_tta.runs.measure import notes as measure_notes
from cafe_tta.serve.store import FORMAT, KIND

COMMANDS = ("demo", "train", "stats", "adapt", "corrupt", "bench", "report", "methods")
runner = CliRunner()


def run(*args, code=0):
    """Runs a command in this process; a command that fails must say why in one line."""
    result = runner.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    if code == 2:
        assert re.fullmatch(r"(loading .+\n)?(images are read at .+\n)?error: .+\n", result.stderr), result.stderr
        assert result.stdout == ""
    return result


def process(*args, **options):
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "cafe_tta", *map(str, args)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model that was trained a little, its statistics, and a folder of noisy digits with broken files among them."""
    root = tmp_path_factory.mktemp("made")
    # fmt: off
    trained = run("train", "--data", "digits:train", "--test", "digits:test", "--output", root / "model",
                  "--epochs", 2, "--swag-epochs", 1, "--batch-size", 128)
    grouped = run("stats", "--model", root / "model/model.safetensors", "--data", "digits:train",
                  "--output", root / "stats.safetensors", "--full", "--histograms", root / "histograms.safetensors",
                  "--feature-stats", root / "shard.safetensors")
    # fmt: on
    (root / "train.txt").write_text(trained.stdout)
    (root / "stats.txt").write_text(grouped.stdout)
    digits, random = data.load("digits:test"), np.random.default_rng(0)
    for i in range(60):
        pixels = digits.images([i])[0].astype(float) + random.normal(0, 40, (32, 32, 3))
        path = root / "photos" / str(digits.labels[i]) / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize((32 + i % 3, 32)).save(path)
    (root / "photos/3/empty.png").write_bytes(b"")
    (root / "photos/5/words.jpg").write_text("not an image")
    return root


def adapt(made, output, *args, code=0):
    options = ["--model", made / "model/model.safetensors", "--data", made / "photos", "--output", output]
    options += [] if "--stats" in args else ["--stats", made / "stats.safetensors"]
    options += [] if "--batch-size" in args else ["--batch-size", 16]
    return run("adapt", *options, "--shuffle", *args, code=code)


def assert_same_tensors(first, second):
    a, b = load_file(first), load_file(second)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def predictions(output):
    with (output / "predictions.csv").open() as file:
        return list(csv.DictReader(file))


# The chain


def test_train_writes_a_model_a_posterior_and_a_report(made):
    report = json.loads((made / "model/train.json").read_text())
    assert report["settings"]["epochs"] == 2 and report["images"] == 901
    assert report["classes"] == list("0123456789")
    assert 0.2 < report["test_accuracy"] <= 1
    assert sorted(path.name for path in (made / "model").iterdir()) == [
        "model.safetensors",
        "posterior.safetensors",
        "train.json",
    ]
    assert "on the training images" in (made / "train.txt").read_text()


def test_stats_tell_what_was_found(made):
    told = (made / "stats.txt").read_text()
    source = SourceStats.load(made / "stats.safetensors")
    assert re.search(r"images +901\n", told) and re.search(r"features +128", told)
    assert f"{len(source.groups)}, the widest of {source.widest_group} features" in told
    assert re.search(r"stats\.safetensors, [\d.]+ kB: [\d.]+% of the model's 1\.2 MB", told)
    assert source.full_cov is not None


def test_adapt_answers_every_image_that_can_be_read(made, tmp_path):
    result = adapt(made, tmp_path / "out")
    rows = predictions(tmp_path / "out")
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows) and len(rows) == 60
    assert all(row["class"] in "0123456789" and 0.1 <= float(row["confidence"]) <= 1 for row in rows)
    assert (tmp_path / "out/unreadable.csv").read_text().splitlines() == [
        "file,why",
        "3/empty.png,the file is empty",
        "5/words.jpg,not an image of a known format",
    ]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    right = np.mean([row["file"].split("/")[0] == row["class"] for row in rows])
    assert summary["accuracy"] == pytest.approx(right)
    assert (summary["images"], summary["unreadable"], summary["steps"]) == (60, 2, 1)  # batches of 16 share a step
    assert summary["measured"]["images"] == 60
    assert summary["measured"]["alignment"]["after"] < summary["measured"]["alignment"]["before"]
    assert summary["measured"]["frechet_distance"]["before"] > 0
    assert "60, 2 unreadable left out" in result.stdout and "Fréchet distance" in result.stdout
    # No bar where nobody watches.
    assert result.stderr == "images are read at 32 px, mean 0.5,0.5,0.5, std 0.5,0.5,0.5\n"
    assert not (tmp_path / "out/progress").exists()


def test_the_state_can_be_loaded_again(made, tmp_path):
    from cafe_tta import create, models, split_classifier

    adapt(made, tmp_path / "out")
    classifier = split_classifier(models.load(made / "model/model.safetensors").model)
    adapter = create("cafe-plus", classifier, SourceStats.load(made / "stats.safetensors"), batch_size=16)
    adapter.load(tmp_path / "out/state.safetensors")
    assert adapter.counters.images == 60


RUNS = [(name, "--online") for name in METHODS if name != "moetta"]  # which has no business with a ResNet
RUNS += [(name, "--offline") for name, kind in METHODS.items() if kind.in_tables]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_every_method_runs(name, mode, made, tmp_path):
    """With the flags of 0.1.0, which are hidden aliases of --source."""
    aliases = {
        "histograms": ["--histograms", made / "histograms.safetensors"],
        "posterior": ["--posterior", made / "model/posterior.safetensors"],
        "data": ["--source-data", "digits:train"],
    }
    options, needs = aliases.get(METHODS[name].needs or "", []), METHODS[name].needs
    if needs is not None and needs not in ("stats", *aliases):  # a kind of your own
        model = made / "model/model.safetensors"
        run("stats", "--kind", needs, "--model", model, "--data", "digits:test", "--output", tmp_path / "value")
        options = ["--source", tmp_path / "value"]
    adapt(made, tmp_path / "out", "--method", name, mode, "--measure", 20, "--batch-size", 59, *options)
    assert len(predictions(tmp_path / "out")) == 60  # the last batch is a single image


def test_a_method_that_needs_nothing_may_unmix_with_statistics(made, tmp_path):
    adapt(made, tmp_path / "out", "--method", "tent", "--set", "normalisation=unmix", "--measure", 0)
    assert json.loads((tmp_path / "out/summary.json").read_text())["options"]["normalisation"] == "unmix"


@pytest.mark.parametrize(("name", "value"), [("fr", "histograms"), ("bacs", "model/posterior")])
def test_a_method_that_needs_something_else_may_unmix_with_statistics_beside_it(name, value, made, tmp_path):
    unmixing = ("--method", name, "--set", "normalisation=unmix", "--measure", 0)
    own = ("--model", made / "model/model.safetensors", "--source", made / f"{value}.safetensors", *unmixing)
    folders = ("--data", made / "photos", "--output", tmp_path / "out", "--batch-size", 16, "--shuffle")
    refused = run("adapt", *own, *folders, code=2)
    need = "histograms" if name == "fr" else "posterior"
    assert f"{name} needs stats from the source domain to unmix, but `source` has {need}; make them" in refused.stderr
    result = run("adapt", *own, *folders, "--source", made / "stats.safetensors")
    assert re.search(r"clusters +\d+: \d+", result.stdout)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["settings"]["source"].keys() == {need, "stats"} and sum(summary["clusters"]) > 0


def test_labels_never_change_an_answer(made, tmp_path):
    (tmp_path / "flat").mkdir()
    for path in (made / "photos").rglob("*.png"):
        (tmp_path / "flat" / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    adapt(made, tmp_path / "classes")
    result = adapt(made, tmp_path / "none", "--data", tmp_path / "flat")
    assert "unknown: no class folders or labels" in result.stdout
    with_labels, without = predictions(tmp_path / "classes"), predictions(tmp_path / "none")
    # 5/words.jpg is not among the flat ones: the order of the images differs, so most answers, not all, agree.
    assert np.mean([a["class"] == b["class"] for a, b in zip(with_labels, without, strict=True)]) > 0.8


def test_threads_that_read_ahead_change_nothing(made, tmp_path):
    adapt(made, tmp_path / "one")
    adapt(made, tmp_path / "two", "--workers", 2)
    assert (tmp_path / "one/predictions.csv").read_bytes() == (tmp_path / "two/predictions.csv").read_bytes()


def test_without_the_whole_covariance_the_frechet_distance_is_said_to_be_unknown(made, tmp_path):
    run("stats", "--merge", made / "shard.safetensors", "--output", tmp_path / "s.safetensors", "--num-groups", 7)
    assert len(SourceStats.load(tmp_path / "s.safetensors").groups) == 7
    result = adapt(made, tmp_path / "out", "--stats", tmp_path / "s.safetensors")
    assert "unknown: the statistics were made without --full" in result.stdout


def test_shards_merge_into_the_whole(made, tmp_path):
    halves = tmp_path / "halves"
    digits = data.load("digits:train")
    for number, part in enumerate(np.array_split(np.arange(len(digits)), 2)):
        (halves / str(number)).mkdir(parents=True)
        np.save(halves / str(number) / "images.npy", digits.images(part))
        # fmt: off
        run("stats", "--model", made / "model/model.safetensors", "--data", f"arrays:{halves / str(number)}",
            "--feature-stats", tmp_path / f"{number}.safetensors")
        # fmt: on
    merged = tmp_path / "merged.safetensors"
    run("stats", "--merge", tmp_path / "0.safetensors", tmp_path / "1.safetensors", "--output", merged)
    np.testing.assert_allclose(SourceStats.load(merged).mean, FeatureStats.load(made / "shard.safetensors").mean)


def test_a_limit_is_drawn_from_all_classes(made, tmp_path):
    model = made / "model/model.safetensors"
    result = run("stats", "--model", model, "--data", "digits:train", "--output", tmp_path / "s", "--limit", 50)
    assert re.search(r"images +50\n", result.stdout)


def test_images_are_read_as_those_of_the_statistics_were(made, tmp_path):
    """Other settings than the model's own, given to `stats` alone; with class names of its class folders."""
    model, stats = made / "model/model.safetensors", tmp_path / "other.safetensors"
    named = ("stats", "--model", model, "--data", "digits:test", "--mean", ".4,.4,.4", "--image-size", 40)
    shown = run(*named, "--output", stats)
    line = "40 px, mean 0.4,0.4,0.4, std 0.5,0.5,0.5"
    assert f"images are read at {line}\n" in shown.stderr and f"read at   {line}\n" in shown.stdout
    result = adapt(made, tmp_path / "out", "--stats", stats)
    assert result.stderr.startswith(f"images are read at {line}\n")
    assert (
        "size=40, mean=(0.4, 0.4, 0.4)"
        in json.loads((tmp_path / "out/summary.json").read_text())["settings"]["preprocessing"]
    )
    given = adapt(made, tmp_path / "given", "--stats", stats, "--image-size", 40, "--mean", ".4,.4,.4")
    assert predictions(tmp_path / "given") == predictions(tmp_path / "out") and given.stderr == result.stderr
    checked = run("serve", "--model", model, "--source", stats, "--check")
    assert f"images      are read at {line}\n" in checked.stdout


def test_statistics_that_do_not_know_how_their_images_were_read_are_taken_with_a_note(made, tmp_path):
    stats = SourceStats.load(made / "stats.safetensors")
    old = {name: value for name, value in stats.meta.items() if name != "images"}
    replace(stats, meta=old).save(tmp_path / "old.safetensors")
    result = adapt(made, tmp_path / "out", "--stats", tmp_path / "old.safetensors", "--std", ".6,.6,.6")
    line, note = result.stderr.splitlines()[:2]
    assert line == "images are read at 32 px, mean 0.5,0.5,0.5, std 0.6,0.6,0.6"
    assert note.endswith("old.safetensors does not say how its images were read; it should have been in the same way")


def test_monitor_prints_drift_as_a_table_and_as_csv(made):
    options = ("monitor", "--model", made / "model/model.safetensors", "--source", made / "stats.safetensors")
    table = run(*options, "--data", made / "photos", "--every", 30)
    rows = [line.split() for line in table.stdout.splitlines()]
    assert rows[0] == ["images", "up", "to", "drift"] and [row[0] for row in rows[1:]] == ["30", "60"]
    assert "left out 3/empty.png" in table.stderr
    printed = run(*options, "--data", made / "photos", "--every", 30, "--csv")
    lines = list(csv.DictReader(printed.stdout.splitlines()))
    assert [line["drift"] for line in lines] == [row[-1] for row in rows[1:]]
    clean = run(*options, "--data", "digits:test", "--every", 896, "--window", 896, "--csv")
    (line,) = csv.DictReader(clean.stdout.splitlines())
    assert 0.9 < float(line["drift"]) < 1.1 < float(lines[-1]["drift"])


def test_images_that_come_class_by_class_are_remarked_on(made, tmp_path):
    result = adapt(made, tmp_path / "out", "--no-shuffle")
    notes = result.stderr.splitlines()
    assert notes[1] == "note: the images come class by class, which misleads every method; --shuffle shuffles them"


def test_a_rise_of_the_alignment_loss_is_remarked_on():
    adapter = create("adabn", split_classifier(DigitsResNet()))
    worse = Measurement(images=60, alignment=(1.0, 2.5), frechet=None, accuracy=None)
    better = replace(worse, alignment=(2.5, 1.0))
    early, late = Followed(batches=4, source_share=0.66), Followed(batches=40, source_share=0.01)
    (text,) = measure_notes(worse, early, adapter=adapter, images=60)
    assert "alignment loss of the model in evaluation mode rose from 1 to 2.5" in text
    assert "still 66% the source's after 4 batches" in text
    (text,) = measure_notes(worse, late, adapter=adapter, images=60)
    assert text.endswith("rose from 1 to 2.5")
    (text,) = measure_notes(better, early, adapter=adapter, images=60)
    assert text.startswith("offline answers use BatchNorm's running statistics, which are still 66% the source's")
    assert not measure_notes(better, late, adapter=adapter, images=60)


# Stopping and going on


class PowerCut(BaseException):
    pass


# 60 images in batches of 16: 4 batches online; 4 that adapt and 4 that answer offline. Saved after every second one.
@pytest.mark.parametrize(("mode", "batches"), [("--online", 1), ("--online", 3), ("--offline", 3), ("--offline", 7)])
def test_a_run_that_was_cut_off_goes_on_to_the_same_end(mode, batches, made, tmp_path, monkeypatch):
    left = batches

    def cut_off(method):
        def called(self, images):
            nonlocal left
            left -= 1
            if left < 0:
                raise PowerCut
            return method(self, images)

        return called

    options = (tmp_path / "cut", mode, "--save-every", 2, "--measure", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Adapter, "forward", cut_off(Adapter.forward))
        patch.setattr(Adapter, "features_and_logits", cut_off(Adapter.features_and_logits))
        with pytest.raises(PowerCut):
            adapt(made, *options)
    if batches > 1:
        adapt(made, *options, code=2)  # neither anew nor on, unless asked
        adapt(made, *options, "--resume")
    else:
        adapt(made, *options)  # nothing was saved yet
    adapt(made, tmp_path / "whole", mode)
    for name in ("predictions.csv", "unreadable.csv"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    assert_same_tensors(tmp_path / "whole/state.safetensors", tmp_path / "cut/state.safetensors")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_process_that_is_stopped_goes_on_to_the_same_end(number, code, made, tmp_path):
    def arguments(output):
        # fmt: off
        return ("adapt", "--model", made / "model/model.safetensors", "--stats", made / "stats.safetensors",
                "--data", made / "photos", "--output", output, "--batch-size", 2, "--save-every", 1, "--measure", 0,
                "--no-shuffle")
        # fmt: on

    running = process(*arguments(tmp_path / "cut"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "cut/progress/progress.json").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(number)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == code, stderr
    if number != signal.SIGKILL:
        assert re.search(r"^interrupted: \d+% done and saved; the same command with --resume continues$", stderr, re.M)
        assert "Traceback" not in stderr
    run(*arguments(tmp_path / "cut"), "--resume")
    run(*arguments(tmp_path / "whole"))
    assert (tmp_path / "cut/predictions.csv").read_bytes() == (tmp_path / "whole/predictions.csv").read_bytes()


def test_a_run_is_not_taken_up_with_other_options(made, tmp_path, monkeypatch):
    def stop(folder, position, adapter):
        save(folder, position, adapter)
        raise PowerCut

    from cafe_tta.runs.progress import ProgressFolder

    save = ProgressFolder.save
    monkeypatch.setattr(ProgressFolder, "save", stop)
    with pytest.raises(PowerCut):
        adapt(made, tmp_path / "out", "--save-every", 1)
    monkeypatch.undo()
    result = adapt(made, tmp_path / "out", "--resume", "--seed", 5, code=2)
    assert "a run with other settings: seed=0 there, 5 here" in result.stderr
    assert "`resume` continues it" in adapt(made, tmp_path / "out", code=2).stderr
    adapt(made, tmp_path / "out", "--overwrite", "--seed", 5)


def test_finished_results_are_not_replaced_unasked(made, tmp_path):
    adapt(made, tmp_path / "out")
    (tmp_path / "out/progress").mkdir()
    for name in ("mine.txt", "progress/mine.txt"):
        (tmp_path / "out" / name).write_text("keep me")
    assert "`overwrite` replaces them" in adapt(made, tmp_path / "out", code=2).stderr
    adapt(made, tmp_path / "out", "--overwrite", "--set", "lr=0.01")
    assert json.loads((tmp_path / "out/summary.json").read_text())["options"]["lr"] == 0.01
    assert (tmp_path / "out/mine.txt").exists() and (tmp_path / "out/progress/mine.txt").exists()


def small_training(output, *args):
    # fmt: off
    return ("train", "--data", "digits:test", "--output", output, "--epochs", 3, "--swag-epochs", 0,
            "--batch-size", 256, *args)
    # fmt: on


def test_training_that_was_stopped_goes_on_to_the_same_end(tmp_path, monkeypatch):
    from cafe_tta.source import train_folder
    from cafe_tta.source.train import train

    def stopped(*args, progress, **kwargs):
        def interrupt(report):
            raise KeyboardInterrupt

        return train(*args, progress=interrupt, **kwargs)

    run(*small_training(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(train_folder, "train", stopped)
        result = run(*small_training(tmp_path / "cut"), code=130)
    assert result.stderr == "interrupted: 1 epochs of 3 are saved; the same command goes on\n"
    result = run(*small_training(tmp_path / "cut"))
    assert result.stderr.startswith("going on after epoch 1 of 3")
    assert_same_tensors(tmp_path / "whole/model.safetensors", tmp_path / "cut/model.safetensors")
    again = run(*small_training(tmp_path / "cut"))
    assert again.stderr.startswith("nothing to do:") and "accuracy" in again.stdout
    other = run(*small_training(tmp_path / "cut", "--lr", 0.5), code=2)
    assert "lr=0.1 there, 0.5 here" in other.stderr


def test_a_recipe_with_some_of_its_options_changed(tmp_path):
    few = ("--epochs", 1, "--warmup", 0, "--swag-epochs", 0, "--augment", "crop")
    run("train", "--recipe", "svhn", "--data", "digits:test", "--output", tmp_path, *few)
    settings = json.loads((tmp_path / "train.json").read_text())["settings"]
    assert (settings["recipe"], settings["model"], settings["mean"]) == ("svhn", "cafe:cifar-cnn", "0.5,0.5,0.5")
    assert (settings["epochs"], settings["swag_epochs"]) == (1, 0)
    assert (settings["batch_size"], settings["nesterov"], settings["label_smoothing"]) == (512, True, 0.2)
    wrong = run("train", "--recipe", "cifar", "--data", "digits:test", "--output", tmp_path, code=2)
    assert "unknown recipe 'cifar'" in wrong.stderr and "choose from: cifar10, cifar10-resnet26" in wrong.stderr


# Errors


def test_errors_are_one_line(made, tmp_path):
    model, out = made / "model/model.safetensors", tmp_path / "out"
    stats, photos = made / "stats.safetensors", made / "photos"
    (tmp_path / "broken.safetensors").write_bytes(stats.read_bytes()[:-9])
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk/1.png").write_bytes(b"")
    common = ("adapt", "--model", model, "--output", out)
    cases = [
        (
            (*common, "--data", photos),
            "cafe-plus needs stats from the source domain, but `source` is empty; make them with",
        ),
        ((*common, "--data", photos, "--method", "fr"), "fr needs histograms from the source domain"),
        ((*common, "--data", photos, "--method", "bacs"), "bacs needs posterior from the source domain"),
        ((*common, "--data", photos, "--method", "dann"), "dann needs data from the source domain"),
        ((*common, "--data", photos, "--method", "caffe"), "did you mean 'cafe'?"),
        ((*common, "--data", photos, "--stats", tmp_path / "none"), "no file at"),
        ((*common, "--data", photos, "--stats", tmp_path / "broken.safetensors"), "not a whole safetensors file"),
        (
            (*common, "--data", photos, "--stats", model),
            "expected a file of source values (source-stats, source-histograms, posterior, ",
        ),
        ((*common, "--data", tmp_path / "none", "--stats", stats), "no folder at"),
        ((*common, "--data", tmp_path / "junk", "--stats", stats), "the only image could not be read"),
        ((*common, "--data", photos, "--stats", stats, "--set", "learningrate=1"), "did you mean 'lr'?; options: "),
        (
            (*common, "--data", photos, "--stats", stats, "--set", "lr=fast"),
            "expected `lr` to be a number at least 0, but got 'fast'",
        ),
        ((*common, "--data", photos, "--stats", stats, "--set", "lr=-1"), "expected `lr` to be at least 0"),
        ((*common, "--data", photos, "--stats", stats, "--preset", "cifr"), "cafe-plus has no preset 'cifr'"),
        ((*common, "--data", photos, "--stats", stats, "--device", "cdua"), "did you mean 'cuda'?"),
        ((*common, "--data", photos, "--stats", stats, "--mean", "1,2"), "expected `mean` to be"),
        (
            (*common, "--data", photos, "--stats", stats, "--image-size", 64, "--std", ".2,.2,.2"),
            "stats.safetensors was made of images at 32 px, mean 0.5,0.5,0.5, std 0.5,0.5,0.5, but size 64, "
            "std 0.2,0.2,0.2 was asked for; leave it out",
        ),
        (
            ("monitor", "--model", model, "--data", photos, "--source", made / "histograms.safetensors"),
            "holds histograms",
        ),
        ((*common, "--data", photos, "--stats", stats, "--resume"), "no stopped run"),
        (("adapt", "--data", photos), "Missing option '--model'; see cafe-tta adapt --help"),
        (("stats", "--model", "timm:resnet26", "--data", "digits", "--output", out), "random weights"),
        (("stats", "--model", model, "--data", "digits"), "expected --output FILE"),
        (("stats", "--merge", "--output", out), "expected --merge with shard files"),
        (("stats", "--model", model, "--data", "digits", "--output", out / "no/x"), "does not exist; create it first"),
        (
            ("stats", "--model", model, "--data", "digits", "--output", out, "--num-groups", 999),
            "expected `num_groups` between 1 and",
        ),
        (("train", "--data", tmp_path / "junk", "--output", out), "has no class folders and no labels"),
        (("train", "--data", "digits", "--output", out, "--augment", "flip"), "expected `augment` to be one of"),
        (
            (*common, "--data", tmp_path / "junk/1.png", tmp_path / "junk/1.png", "--stats", stats),
            "; put a pattern in quotes: --data 'photos/*.jpg'; see cafe-tta adapt --help",
        ),
        ((*common, "--data", photos, "more", "--stats", stats), "extra argument(s) (more); see cafe-tta adapt --help"),
        (("methods", "tnet"), "did you mean 'tent'?"),
        (
            ("predict", "--data", photos),
            "No such command 'predict'; cafe-tta adapt classifies images, with --method source as the model is; see",
        ),
        (("methds",), "Did you mean 'methods'?; see cafe-tta --help"),
    ]
    for args, words in cases:
        result = run(*args, code=2)
        assert words in result.stderr, (args, result.stderr)


def test_debug_shows_where_an_error_comes_from():
    result = runner.invoke(app, ["--debug", "methods", "tnet"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1].startswith("error: unknown method")


def test_a_classifier_with_other_weights_is_refused(made, tmp_path):
    run(*small_training(tmp_path / "other", "--epochs", 1))
    result = adapt(made, tmp_path / "out", "--model", tmp_path / "other/model.safetensors", code=2)
    assert "do not belong to this classifier" in result.stderr


# What is told


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    told = run(command, "--help").stdout
    assert f"Usage: cafe-tta {command}" in told and len(told.splitlines()) > 8


def test_the_help_tells_the_four_steps_in_order():
    told = run("--help").stdout
    places = [told.index(words) for words in ("1. A model", "2. Its statistics", "3. Adapt", "4. Look")]
    assert places == sorted(places)
    assert run().stdout.strip() == told.strip()


@pytest.mark.parametrize("command", [(), ("adapt",), ("serve",)])
def test_help_has_a_short_flag_and_no_types_of_flags(command):
    shown = run(*command, "--help").stdout
    assert run(*command, "-h").stdout == shown and "<bool>" not in shown


def test_the_version_is_told():
    assert re.fullmatch(r"cafe-tta \d+\.\d+\.\d+\S*\n", run("--version").stdout)


def test_what_each_method_can_do_is_told():
    told = run("methods", "--capabilities").stdout
    assert all(re.search(rf"^{name} ", told, re.M) for name in METHODS)
    assert run("methods", "--markdown").stdout == (Path(__file__).parents[1] / "docs/methods.md").read_text()
    assert run("methods", "sar", "--markdown").stdout.count("###") == 1
    assert re.search(r"^passes +2 / 2$", run("methods", "sar").stdout, re.M)


def test_methods_are_listed_with_what_they_need():
    told = run("methods").stdout
    for name, kind in METHODS.items():
        assert re.search(rf"^{name} +{kind.needs or 'nothing'} ", told, re.M)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_a_method_is_told(name):
    described = json.loads(run("methods", name, "--json").stdout)
    told = run("methods", name).stdout
    for option in described["options"]:
        assert option["name"] in told
    assert list(described["presets"]) == list(METHODS[name].presets)
    assert json.loads(run("methods", "--json").stdout)[name] == described


def test_importing_the_package_loads_no_command_line():
    code = "import sys, cafe_tta; print([m for m in ('typer', 'rich', 'timm', 'torchvision') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_pipe_that_closes_early_is_no_error():
    running = process("methods", "--json")
    running.stdout.close()
    assert "Traceback" not in running.stderr.read()
    running.wait(30)
    running.stderr.close()


# Options as text

values = {
    int: st.integers(-(10**9), 10**9),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(alphabet="ab =,0.", max_size=8),
}


def parse_value(text, kind):
    return Described("x", kind, None, _Rule("")).parse(text)


def parse_settings(name, texts):
    return MethodOptions(name, set=texts).config()


@given(st.sampled_from(sorted(values, key=str)).flatmap(lambda kind: st.tuples(st.just(kind), values[kind])))
def test_a_value_comes_back_from_its_text(pair):
    kind, value = pair
    assert parse_value(str(value), kind) == value
    if kind is not str:
        assert parse_value(str(value), kind | None) == value
        assert parse_value("None", kind | None) is None


@given(st.text(max_size=30), st.sampled_from(sorted(METHODS)))
def test_any_text_is_a_setting_or_an_error_that_says_why(text, name):
    try:
        parse_settings(name, [text])
    except ValueError as error:
        assert re.search("expected|has no option", str(error))


@given(st.text(max_size=12))
def test_no_text_gets_past_the_type_of_an_option(text):
    try:
        value = parse_value(text, int | None)
    except ValueError as error:
        assert f"expected `x` to be a whole number, or none, but got {text!r}" in str(error)
    else:
        assert value is None or isinstance(value, int)


@pytest.mark.parametrize("text", ["lr=nan", "lr=inf", "lr", "=1", "lr=1 2", "memory=maybe", "min_batch=1.5"])
def test_bad_settings_are_refused(text):
    with pytest.raises(ValueError, match="expected"):
        parse_settings("cafe", [text])


def test_an_option_is_given_once():
    with pytest.raises(ValueError, match="given twice"):
        parse_settings("cafe", ["lr=1", "lr=2"])


def test_a_preset_and_settings_add_up():
    config = MethodOptions("cafe", "cifar-online", ["lr=0.5", "optimizer=adam"]).config()
    assert (config.answer, config.samples_per_dim, config.lr, config.optimizer) == ("after-eval", 1.25, 0.5, "adam")


def test_batches_without_a_step_are_counted_with_the_reason(made, tmp_path):
    result = adapt(made, tmp_path / "out", "--method", "cafe", "--batch-size", 1, "--measure", 0)
    assert re.search(r"without a step +60 of 60 batches: a batch of 1 is too small to normalise with", result.stdout)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["batches_without_step"] == 60 and summary["steps"] == 0
    assert "; no step was taken (a batch of 1 is too small to normalise with (min_batch=2))" in summary["verdict"]


def test_resuming_a_finished_run_changes_nothing(made, tmp_path):
    adapt(made, tmp_path / "out", "--measure", 0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    adapt(made, tmp_path / "out", "--measure", 0, "--resume")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    result = adapt(made, tmp_path / "out", "--measure", 0, "--resume", "--set", "lr=0.5", code=2)
    assert "lr=0.02 there, 0.5 here" in result.stderr and "momentum" not in result.stderr


# Sheets of clusters


def clusters(output):
    with (output / "clusters.csv").open() as file:
        return {row["file"]: int(row["cluster"]) for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def mixed(made):
    """Digits, every third one without contrast, the others noisy: at least two clusters."""
    digits, noisy = data.load("digits:test").images(range(150)), np.arange(150) % 3 > 0
    pixels = corruptions.corrupt(digits, "contrast", severity=5)
    pixels[noisy] = corruptions.corrupt(digits, "impulse_noise", severity=5)[noisy]
    (made / "mixed").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(made / "mixed" / f"{i:03d}.png")
    (made / "mixed/empty.png").write_bytes(b"")
    return made / "mixed"


def test_a_sheet_shows_images_of_every_cluster_the_largest_first(made, mixed, tmp_path):
    result = adapt(made, tmp_path / "out", "--method", "unmix", "--data", mixed, "--measure", 0, "--sheet")
    of = clusters(tmp_path / "out")
    assert len(of) == 150 and "empty.png" not in of
    sizes = [list(of.values()).count(number) for number in range(1, max(of.values()) + 1)]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) >= 2
    assert json.loads((tmp_path / "out/summary.json").read_text())["clusters"] == sizes
    assert re.search(rf"clusters +{len(sizes)}: {sizes[0]}, {sizes[1]}", result.stdout)
    assert "clusters.png, clusters.csv" in result.stdout
    grey, noisy = ([of[f"{i:03d}.png"] for i in range(150) if (i % 3 > 0) == noise] for noise in (False, True))
    assert not set(grey) & set(noisy) - {0} and grey.count(0) + noisy.count(0) < 15

    rows = [number for number in range(1, len(sizes) + 1)][:16] + [0] * (0 in of.values())
    with Image.open(tmp_path / "out/clusters.png") as sheet:
        pixels = np.asarray(sheet)
    for line, number in enumerate(rows):
        own = [np.asarray(Image.open(mixed / name)) for name, cluster in of.items() if cluster == number]
        for column in range(min(12, len(own))):
            top, left = 20 + 56 + line * (96 + 12), 20 + 190 + column * (96 + 3)
            shown = pixels[top : top + 96 : 3, left : left + 96 : 3]  # every pixel is 3 × 3 large
            assert any(np.array_equal(shown, image) for image in own), (number, column)


def test_a_sheet_of_a_run_that_was_cut_off_is_the_same(made, mixed, tmp_path, monkeypatch):
    options = ("--method", "unmix", "--data", mixed, "--measure", 0, "--sheet", "--save-every", 1)
    forward, left = Adapter.forward, [2]

    def cut_off(self, images):
        left[0] -= 1
        if left[0] < 0:
            raise PowerCut
        return forward(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(Adapter, "forward", cut_off)
        with pytest.raises(PowerCut):
            adapt(made, tmp_path / "cut", *options)
    assert not (tmp_path / "cut/clusters.png").exists()
    adapt(made, tmp_path / "cut", *options, "--resume")
    adapt(made, tmp_path / "whole", *options[:-3])  # without the sheet, which is asked for when the run is over
    assert not (tmp_path / "whole/clusters.png").exists()
    told = adapt(made, tmp_path / "whole", *options, "--resume").stdout
    assert re.search(r"clusters +\d+: \d+", told) and "clusters.png, clusters.csv" in told
    for name in ("clusters.png", "clusters.csv"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    assert "nothing to do" in adapt(made, tmp_path / "whole", *options, "--resume").stderr
    adapt(made, tmp_path / "whole", *options[:4], "--overwrite", "--measure", 0)
    assert not (tmp_path / "whole/clusters.png").exists()  # of the run that was replaced


def test_a_sheet_without_unmixing_is_refused_before_anything_runs(tmp_path):
    command = ("adapt", "--model", tmp_path / "missing", "--data", tmp_path / "missing", "--output", tmp_path / "out")
    for method in (("--method", "tent"), ("--method", "cafe", "--set", "normalisation=blend")):
        stderr = run(*command, *method, "--sheet", code=2).stderr
        assert f"expected a method that unmixes with `sheet`, which shows its clusters, but {method[1]} with" in stderr
    assert not (tmp_path / "out").exists()


def test_contact_sheet_of_corrupted_copies_is_not_an_image_of_theirs(made, tmp_path):
    run("corrupt", "--data", made / "photos", "--output", tmp_path / "copies", "--corruptions", "fog", "--severity", 5)
    assert (tmp_path / "copies/contact-sheet.png").is_file()
    names = [data.load(tmp_path / "copies").item_name(i) for i in range(len(data.load(tmp_path / "copies")))]
    assert len(names) == 60 and not any("contact-sheet" in name for name in names)


# What stands in the way of a first try


def test_install_hints_name_packages_that_an_index_has():
    assert {"typer>=0.15", "fastapi>=0.115"} <= set(libraries("serve"))  # with what other extras bring to it
    for extra in ("cli", "models", "corruptions", "serve", "all"):
        assert libraries(extra) and not any("cafe" in library for library in libraries(extra))


def test_a_missing_library_of_the_corruptions_is_said_before_anything_is_trained(tmp_path, monkeypatch):
    for family in ("noise", "blur", "weather", "digital"):  # they are imported when they are first used
        monkeypatch.delitem(sys.modules, f"cafe_tta.corruptions.{family}", raising=False)
    monkeypatch.setitem(sys.modules, "cv2", None)
    said = run("demo", "--output", tmp_path / "demo", code=2).stderr
    assert re.search(r'the corruption \w+ needs cv2, which is not installed; .*: pip install "opencv', said)
    assert not (tmp_path / "demo").exists()


def test_progress_is_told_in_lines_where_nobody_watches(made, tmp_path, monkeypatch):
    monkeypatch.setattr(console._Lines, "EVERY", 0.0)
    said = adapt(made, tmp_path / "out").stderr
    assert re.search(r"^adapting: 17 of 62, about \d+ s left$", said, re.MULTILINE)
    assert said.splitlines()[-1].startswith("adapting: 62 of 62")
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(console._Lines, "EVERY", 30.0)
    told = []
    monkeypatch.setattr(console, "say", told.append)
    with console.progress("reading", 100) as advance:
        advance(50)  # what an earlier run had done
        for _ in range(40):
            now += 2
            advance(1)
    assert told == ["reading: 65 of 100, about 70 s left", "reading: 80 of 100, about 40 s left"]


@pytest.mark.parametrize("name", ["serve", "adapt", "bench", "stats", "train", "simulate", "corrupt"])
def test_help_shows_whole_names_in_80_columns(name, monkeypatch):
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", 80)
    shown = run(name, "--help").stdout
    assert not re.search(r"--[\w-]*…", shown) and max(map(len, shown.splitlines())) <= 80


def test_check_shows_which_options_of_the_method_were_changed(made):
    common = ("serve", "--check", "--model", made / "model/model.safetensors", "--source", made / "stats.safetensors")
    assert re.search(r"^method +cafe-plus, all options at their defaults$", run(*common).stdout, re.MULTILINE)
    changed = run(*common, "--set", "lr=0.01", "--set", "momentum=0.5").stdout
    assert re.search(r"^method +cafe-plus, lr=0.01, momentum=0.5$", changed, re.MULTILINE)


def test_check_looks_at_the_saved_state(made, tmp_path):
    serve = ("serve", "--model", made / "model/model.safetensors", "--method", "tent", "--check", "--state")
    assert "a new folder" in run(*serve, tmp_path / "state").stdout and not (tmp_path / "state").exists()
    (tmp_path / "state").mkdir()
    assert "nothing saved yet" in run(*serve, tmp_path / "state").stdout
    classifier = split_classifier(models.load(made / "model/model.safetensors").model)
    tensors = create("tent", classifier).state()
    for number, (method, other) in enumerate((("adabn", False), ("tent", True), ("tent", False)), 1):
        identity = classifier.identity() | ({"feature_layer": "head"} if other else {})
        adapter = {"method": method, "classifier": identity, "config": {}, "counters": {}}
        meta = {"time": 0.0, "adapter": adapter, "version": 3, "highest": 3, "events": [], "opted_out": []}
        storage.write(tmp_path / f"state/snapshot-{number:08d}.safetensors", KIND, FORMAT, tensors, meta)
        if method == "adabn":
            assert "is a state of 'adabn', but this is 'tent'; start with `method` 'adabn' to go on from it, or" in run(
                *serve, tmp_path / "state", code=2).stderr  # fmt: skip
        elif other:
            assert "does not belong to this classifier" in run(*serve, tmp_path / "state", code=2).stderr
        else:
            assert "continues with version 3 of snapshot-00000003" in run(*serve, tmp_path / "state").stdout
    storage.write(tmp_path / "state/snapshot-00000004.safetensors", KIND, FORMAT, tensors, meta | {"version": -5})
    said = " ".join(run(*serve, tmp_path / "state").stdout.split())
    assert "continues with version 3 of snapshot-00000003" in said
    assert "passed over: snapshot-00000004.safetensors: expected `version` to be between 0 and" in said


# What a run came to


def test_a_run_ends_with_one_sentence(made, tmp_path):
    result = adapt(made, tmp_path / "out", "--method", "cafe")
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert result.stdout.splitlines()[-1] == summary["verdict"]
    before, after = summary["measured"]["group_frechet_distance"].values()
    assert after < before
    drift, changed = summary["measured"]["drift"]["before"], summary["changed"]
    assert changed["of"] == 60 and summary["answers"] == "adapted" and summary["worse"] is None
    assert summary["verdict"] == (
        f"The images differ a little from the source images (drift {drift:.2f}; 1 is like them); adapting brought "
        f"their features closer to the source's (Fréchet distance of groups {before:.3g} -> {after:.3g}) and changed "
        f"the answer to {changed['images']} of 60 images ({changed['images'] / 60:.0%}); predictions.csv has the "
        "adapted model's answers, which nothing speaks against."
    )


def test_both_answers_and_the_most_likely_classes_are_written_if_asked_for(made, tmp_path):
    adapt(made, tmp_path / "out", "--both", "--top-k", 3, "--measure", 0)
    adapt(made, tmp_path / "plain", "--measure", 0)
    adapt(made, tmp_path / "source", "--method", "source", "--measure", 0)
    rows, plain, source = (predictions(tmp_path / name) for name in ("out", "plain", "source"))
    names = ["class", "confidence", "class_2", "confidence_2", "class_3", "confidence_3"]
    assert list(rows[0]) == ["file", *names, *(f"adapted_{n}" for n in names), *(f"source_{n}" for n in names)]
    assert [(r["class"], r["confidence"]) for r in rows] == [(r["class"], r["confidence"]) for r in plain]
    assert all(row["adapted_class_2"] == row["class_2"] for row in rows)
    assert [row["source_class"] for row in rows] == [row["class"] for row in source]
    for row in rows:
        shares = [float(row[f"source_confidence{rank}"]) for rank in ("", "_2", "_3")]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1.00001
        assert len({row["source_class"], row["source_class_2"], row["source_class_3"]}) == 3
    changed = sum(row["adapted_class"] != row["source_class"] for row in rows)
    assert json.loads((tmp_path / "out/summary.json").read_text())["changed"] == {"images": changed, "of": 60}
    refused = adapt(made, tmp_path / "many", "--top-k", 11, code=2)
    assert "expected `top_k` to be at most 10, the model's classes, but got 11" in refused.stderr


HARMFUL = ("--method", "cafe", "--set", "lr=5", "--data", "digits:test", "--limit", 200)


@pytest.mark.parametrize("both", [[], ["--both"]])
def test_where_the_adapted_model_is_worse_the_source_model_answers(made, tmp_path, both):
    adapt(made, tmp_path / "out", *HARMFUL, *both)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    adapt(made, tmp_path / "source", "--method", "source", *HARMFUL[4:])
    given, source = predictions(tmp_path / "out"), predictions(tmp_path / "source")
    assert [(r["class"], r["confidence"]) for r in given] == [(r["class"], r["confidence"]) for r in source]
    assert summary["answers"] == "source" and summary["changed"]["images"] > 0
    assert summary["accuracy"] == json.loads((tmp_path / "source/summary.json").read_text())["accuracy"]
    why = "; predictions.csv has the source model's answers, because the adapted one is worse: its "
    assert why + summary["worse"].removeprefix("its ") in summary["verdict"]


def test_without_the_judge_the_adapted_model_answers_whatever_it_says(made, tmp_path):
    adapt(made, tmp_path / "out", *HARMFUL, "--no-judge")
    adapt(made, tmp_path / "source", "--method", "source", *HARMFUL[4:])
    assert [r["class"] for r in predictions(tmp_path / "out")] != [r["class"] for r in predictions(tmp_path / "source")]
    verdict = json.loads((tmp_path / "out/summary.json").read_text())["verdict"]
    assert "has the adapted model's answers, although it is worse than the source model: its " in verdict


def test_the_judge_takes_steps_back(made, tmp_path):
    result = adapt(made, tmp_path / "out", *HARMFUL[:4], "--data", "digits:test", "--batch-size", 128)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["rolled_back_steps"] > 0
    assert f"{summary['rolled_back_steps']} taken back by the judge" in result.stdout
    names = load_file(tmp_path / "out/state.safetensors").keys()
    assert not any(name.startswith("judged.") for name in names)  # no image of the user's


# A saved state


def test_a_state_answers_other_images_without_adapting(made, tmp_path):
    adapt(made, tmp_path / "out")
    model, state = made / "model/model.safetensors", tmp_path / "out/state.safetensors"
    own = ("--model", model, "--data", made / "photos", "--measure", 20)
    told = run("adapt", *own, "--apply", state, "--output", tmp_path / "applied").stdout
    assert_same_tensors(state, tmp_path / "applied/state.safetensors")
    adapter = load_adapter(state, models.load_classifier(models.ModelOptions(model)).classifier)
    chosen = models.load_classifier(models.ModelOptions(model))
    loader = data.Loader(data.load(str(made / "photos")), chosen.preprocessing, 16)
    expected = torch.cat([adapter.predict(batch.images) for batch in loader.batches()]).argmax(1)
    assert [int(row["class"]) for row in predictions(tmp_path / "applied")] == expected.tolist()
    assert "cafe-plus, saved state" in told and "the saved state brought their features closer" in told


def test_a_run_goes_on_from_a_state_as_if_it_had_not_ended(made, tmp_path):
    flags = ("--data", "digits:test", "--measure", 0, "--no-judge", "--no-shuffle", "--batch-size", 64)
    adapt(made, tmp_path / "first", *flags, "--limit", 128)
    model = ("--model", made / "model/model.safetensors")
    run("adapt", *model, *flags[:-2], "--state", tmp_path / "first/state.safetensors", "--output", tmp_path / "next")
    classifier = models.load_classifier(models.ModelOptions(model[1]))
    adapter = create("cafe-plus", classifier.classifier, SourceStats.load(made / "stats.safetensors"), batch_size=64)
    digits = data.load("digits:test")
    for part in np.split(np.arange(128), 2):
        adapter(classifier.preprocessing(digits.images(part)))
    answers = [
        adapter(classifier.preprocessing(digits.images(part))).argmax(1) for part in np.split(np.arange(896), 14)
    ]
    assert [int(row["class"]) for row in predictions(tmp_path / "next")] == torch.cat(answers).tolist()
    summary = json.loads((tmp_path / "next/summary.json").read_text())
    assert summary["batches"] == 14  # of this run
    after = load_adapter(tmp_path / "next/state.safetensors", classifier.classifier)
    assert after.counters.batches == 16  # of all


def test_a_state_that_does_not_fit_is_refused(made, tmp_path):
    adapt(made, tmp_path / "out", "--measure", 0)
    state, stats = tmp_path / "out/state.safetensors", made / "stats.safetensors"
    common = (
        "adapt",
        "--model",
        made / "model/model.safetensors",
        "--data",
        made / "photos",
        "--output",
        tmp_path / "x",
    )
    for flags, text in (
        (("--apply", state, "--method", "tent"), "is a state of 'cafe-plus', but `method` is 'tent'; leave it out"),
        (("--state", state, "--set", "lr=7"), "was saved with other options: lr=0.02 there, 7.0 here; leave them out"),
        (
            ("--state", state, "--apply", state),
            "expected `state`, to go on adapting, or `apply`, to only",
        ),
        (("--apply", stats), "expected an adapter-state file, but it holds 'source-stats'"),
        (("--apply", tmp_path / "none"), "expected an adapter-state file"),
        (("--apply", state, "--image-size", 64), "was made of images at 32 px"),
    ):
        assert text in run(*common, *flags, code=2).stderr
    run("train", "--data", "digits:train", "--output", tmp_path / "other", "--epochs", 1, "--seed", 3)
    other = ("adapt", "--model", tmp_path / "other/model.safetensors", *common[3:], "--apply", state)
    assert "belong to this classifier: " in run(*other, code=2).stderr
    run(*common, "--apply", state, "--method", "cafe-plus", "--set", "lr=0.02", "--batch-size", 7, "--measure", 0)


def test_a_state_of_a_method_that_needs_nothing_goes_on_too(made, tmp_path):
    adapt(made, tmp_path / "out", "--method", "tent", "--measure", 0)
    model = ("--model", made / "model/model.safetensors", "--data", made / "photos", "--measure", 0)
    for flag in ("--state", "--apply"):
        state = tmp_path / "out/state.safetensors"
        result = run("adapt", *model, flag, state, "--output", tmp_path / flag, "--shuffle")
        assert "tent, " in result.stdout and len(predictions(tmp_path / flag)) == 60
