"""Shards of statistics in files: all of them make the whole, and anything else is refused."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import cafe_tta as cafe
from cafe_tta import data, models
from cafe_tta.cli import app
from cafe_tta.source.shards import bounds


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two networks with random weights, and ten shards of 37 images in batches of 8: five are empty."""
    root = tmp_path_factory.mktemp("shards")
    preprocessing = models.Preprocessing(size=32, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))
    for seed, name in enumerate(("ours", "theirs")):
        torch.manual_seed(seed)
        classifier = cafe.split_classifier(models.build("cafe:digits-resnet", num_classes=10))
        models.save(root / name, classifier, "cafe:digits-resnet", preprocessing)
    for number in range(1, 11):
        make_shard(root, number, 10, root / f"{number}")
    return root


def make_shard(root, number, of, output, *options, model="ours", limit=37):
    # fmt: off
    return run("stats", "--model", root / model, "--data", "digits:test", "--batch-size", 8, "--limit", limit,
               "--shard", f"{number}/{of}", "--output", output, *options)
    # fmt: on


def refused(*args):
    result = run("stats", "--merge", *args, "--output", Path(args[0]).parent / "never", code=2)
    assert not (Path(args[0]).parent / "never").exists()
    return result.stderr


@given(st.integers(0, 500), st.integers(1, 70), st.integers(1, 40))
def test_parts_are_whole_batches_that_make_the_whole(total, batch_size, of):
    parts = [bounds(total, batch_size, number, of) for number in range(of)]
    assert parts[0][0] == 0 and parts[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(start % batch_size == 0 or start == total for start, _ in parts)
    sizes = [-(-(stop - start) // batch_size) for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")
def test_all_shards_in_any_order_make_the_whole(made, tmp_path):
    whole = ("stats", "--model", made / "ours", "--data", "digits:test", "--batch-size", 8, "--limit", 37)
    run(*whole, "--feature-stats", tmp_path / "whole", "--output", tmp_path / "whole.grouped")
    files = [made / f"{number}" for number in (3, 1, 2, 10, 9, 8, 4, 5, 7, 6)]
    result = run(
        "stats", "--merge", *files, "--feature-stats", tmp_path / "merged", "--output", tmp_path / "merged.grouped"
    )
    assert re.fullmatch(r"warning: the statistics are of 37 images.*\n", result.stderr)
    assert re.search(r"images +37\n", result.stdout)
    ours, theirs = (cafe.FeatureStats.load(tmp_path / name) for name in ("merged", "whole"))
    assert ours.count == theirs.count == 37 and ours.meta == theirs.meta
    assert torch.equal(ours.sample, theirs.sample)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(ours.cov, theirs.cov, rtol=1e-12, atol=1e-15)
    grouped = [cafe.SourceStats.load(tmp_path / f"{name}.grouped") for name in ("merged", "whole")]
    assert all(map(torch.equal, grouped[0].groups, grouped[1].groups))
    cafe.create("cafe", models_classifier(made), grouped[0])  # belongs to the classifier


def models_classifier(made):
    return cafe.split_classifier(models.load(str(made / "ours")).model)


def test_a_shard_says_which_it_is_and_an_empty_one_is_no_statistics(made, tmp_path):
    result = make_shard(made, 2, 10, tmp_path / "shard")
    assert "shard 2 of 10" in result.stdout and "images   8\n" in result.stdout
    with pytest.raises(ValueError, match="is a shard without images; merge it with the others"):
        cafe.FeatureStats.load(made / "1")


def test_missing_and_repeated_shards_are_refused(made):
    every = [made / f"{number}" for number in range(1, 11)]
    assert "2 of 10 shards are missing: 1/10, 4/10\n" in refused(*every[1:3], *every[4:])
    text = refused(*every, every[5])
    assert f"shard 6/10 was given twice: {every[5]}, {every[5]}" in text


def test_shards_of_something_else_are_refused(made, tmp_path):
    first = make_shard(made, 1, 2, tmp_path / "1") and tmp_path / "1"
    make_shard(made, 2, 2, tmp_path / "theirs", model="theirs")
    text = refused(first, tmp_path / "theirs")
    assert "1 and" in text and "theirs do not belong to the same classifier" in text and "tensors differ" in text
    make_shard(made, 2, 2, tmp_path / "other", limit=38)
    assert "are not parts of the same whole: images=37 there, 38 here; make them again alike" in refused(
        first, tmp_path / "other"
    )
    make_shard(made, 2, 2, tmp_path / "shifted", "--mean", "0.5,0.5,0.5")
    assert "preprocessing.mean=[0.3, 0.3, 0.3] there" in refused(first, tmp_path / "shifted")
    make_shard(made, 2, 3, tmp_path / "third")
    assert "is one of 2 shards, but" in refused(first, tmp_path / "third")


def test_files_of_sets_of_their_own_are_merged_with_what_is_known(made, tmp_path):
    digits = data.load("digits:test")
    for number, part in enumerate((range(20), range(20, 50))):
        (tmp_path / str(number)).mkdir()
        np.save(tmp_path / str(number) / "images.npy", digits.images(part))
        # fmt: off
        run("stats", "--model", made / "ours", "--data", f"arrays:{tmp_path / str(number)}",
            "--feature-stats", tmp_path / f"{number}.shard")
        # fmt: on
    files = [tmp_path / "0.shard", tmp_path / "1.shard"]
    result = run("stats", "--merge", *files, "--feature-stats", tmp_path / "merged")
    assert (
        re.search(r"images +50\n", result.stdout)
        and "note: these files do not say which images they are of" in result.stderr
    )
    copied = tmp_path / "copy.shard"
    copied.write_bytes(files[0].read_bytes())
    assert "hold the same statistics: their images would count twice" in refused(*files, copied)
    assert "is a numbered shard, but" in refused(made / "1", files[0])


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/", "-1/3", "1/3/4"])
def test_wrong_shards_are_refused(made, tmp_path, text):
    result = run(
        "stats", "--model", made / "ours", "--data", "digits:test", "--shard", text, "--output", tmp_path / "x", code=2
    )
    assert f"expected a shard such as 1/8, 2/8, … 8/8, but got '{text}'" in result.stderr


def test_options_that_a_shard_cannot_heed_are_refused(made, tmp_path):
    begin = ("stats", "--model", made / "ours", "--data", "digits:test", "--shard", "1/2")
    for options, text in (
        (
            ("--output", tmp_path / "x", "--num-groups", 3),
            "a shard has no groups yet: give --num-groups",
        ),
        (("--feature-stats", tmp_path / "x"), "expected --shard with --output FILE"),
        (("--output", tmp_path / "x", "--histograms", tmp_path / "h"), "other kinds are made by one process"),
    ):
        assert text in run(*begin, *options, code=2).stderr
    assert not list(tmp_path.iterdir())


def test_all_empty_shards_are_refused(made, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.png").write_text("no image")
    for number in (1, 2):
        result = run(
            "stats",
            "--model",
            made / "ours",
            "--data",
            empty,
            "--shard",
            f"{number}/2",
            "--output",
            tmp_path / f"{number}",
        )
    assert "images   0, 1 unreadable left out" in result.stdout
    assert "expected at least one source image, but all the shards are empty" in refused(tmp_path / "1", tmp_path / "2")
