"""Records that are broken, doubled, or do not fit together: the report says which, and makes no table of them."""

import math
import re

import pytest

from cafe_tta.bench import report
from cafe_tta.bench.records import packed
from cafe_tta.bench.report.columns import columns

from .report_records import cells, record, save


def test_nothing_to_report(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no records.jsonl; expected the folder that a benchmark"):
        report.make([tmp_path])
    with pytest.raises(FileNotFoundError, match="there is no file or folder .*nowhere"):
        report.make([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no finished run in"):
        report.make([save(tmp_path, [])])
    with pytest.raises(ValueError, match="expected at least one folder or file"):
        report.make([])


def test_a_broken_line_is_named_and_an_unfinished_last_one_is_left_out(tmp_path):
    path = save(tmp_path, [record(), record("tent")]) / "records.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:50])
    made = report.make([tmp_path])
    assert len(made.records) == 2 and made.notes == (f"{path}, line 3 is unfinished and was left out",)
    path.write_text(whole[:50] + "\n" + whole)
    with pytest.raises(ValueError, match=r"records.jsonl, line 1 is not a JSON record \(.*\); remove the line"):
        report.make([tmp_path])
    path.write_text(whole + whole[:50] + "\n")  # ended by a line break: not a run that was stopped
    with pytest.raises(ValueError, match="line 3 is not a JSON record"):
        report.make([tmp_path])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "record format 2, but this release reads format 1"),
        ({"accuracy": 70.0}, "expected `accuracy` to be a share between 0 and 1, but got 70.0"),
        ({"accuracy": math.nan}, "expected `accuracy` to be a share between 0 and 1, but got nan"),
        ({"by_domain": {"fog-5": "x"}}, "expected `by_domain['fog-5']` to be a share between 0 and 1, but got 'x'"),
        ({"stream": 3}, "expected `stream` to be a list, but got 3"),
        ({"seed": None}, "expected `seed` to be a whole number of at least 0, but got None"),
        ({"method": ""}, "expected `method` to be a text, but got ''"),
        ({"config": [1]}, "expected `config` to be an object, but got [1]"),
        ({"frechet_after": math.inf}, "expected `frechet_after` to be a finite number or null, but got inf"),
        ({"hits": "!"}, "expected `hits` to be 10000 bits in base64, but got '!'"),
        ({"hits": packed([True])}, "expected `hits` to be 10000 bits in base64, but got 'gA=='"),
        (
            {"hits": packed([True] * 10000)},
            "expected `hits` to be as many right answers as the accuracy of 0.5 says, but got '10000 of 10000'",
        ),
        ({"calibration_error": math.nan}, "expected `calibration_error` to be a finite number or null, but got nan"),
        ({"forward_images": -1}, "expected `forward_images` to be a whole number of at least 0, but got -1"),
        ({"code": "abc"}, "expected `code` to be an object, but got 'abc'"),
        ({"episode__images": 0}, "expected `episode.images` to be a whole number of at least 1, but got 0"),
    ],
)
def test_a_record_that_cannot_be_believed(tmp_path, changes, message):
    save(tmp_path, [record("tent"), record(**changes)])
    with pytest.raises(ValueError, match=rf"records.jsonl, line 2: {re.escape(message)}"):
        report.make([tmp_path])


def test_joined_folders_and_repeated_runs(tmp_path):
    one = save(tmp_path / "one", [record("tent"), record("cafe")])
    two = save(tmp_path / "two", [record("cafe", experiment="mixed"), record("source")])
    made = report.make([one, two / "records.jsonl", one])
    assert [line.head[0] for line in made.tables[0].lines] == ["source", "tent", "cafe"]
    assert made.notes == ("1 repeated run counted once",)
    save(two, [record("cafe", 0.51)])
    with pytest.raises(ValueError, match=r"line 2 and .* are the same run .* disagree: accuracy 0.500000 and 0.510000"):
        report.make([one, two])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__digest": "other"}, 'differ in the data: "other" in'),
        ({"model__weights": "other"}, "differ in the model weights"),
        ({"corruptions__preset": "imagenet"}, "differ in the corruption preset"),
        ({"corruptions__frost_is_standard": False}, "differ in the frost textures"),
        ({"episode__images": 2000}, "differ in the number of images"),
        ({"episode__digest": "cd"}, "differ in the images and corruptions dealt"),
        ({"episode__domains": {"fog-5": 10000}}, "differ in the corruptions of an episode"),
        ({"model__preprocessing": {"size": 32}}, "differ in the preprocessing"),
    ],
)
def test_runs_that_cannot_stand_in_one_column(tmp_path, changes, words):
    with pytest.raises(
        ValueError, match=r"cifar10 all-mixed \(offline\): the runs cannot stand in one column"
    ) as caught:
        report.make([save(tmp_path, [record("tent"), record("cafe", **changes)])])
    assert words in str(caught.value) or words.replace('"other" in', '"0123456789abcdef" in') in str(caught.value)
    assert "report them separately" in str(caught.value)


def test_both_records_are_named_with_what_they_have(tmp_path):
    runs = [record("tent"), record("cafe", model__preprocessing={"size": 32, "mean": [0.5, 0.5, 0.5]})]
    with pytest.raises(ValueError) as caught:
        report.make([save(tmp_path, runs)])
    path = tmp_path / "records.jsonl"
    assert f'{{"mean": [0.5, 0.5, 0.5], "size": 32}} in {path}, line 2 (cafe)' in str(caught.value)
    assert f"null in {path}, line 1 (tent)" in str(caught.value)


@pytest.mark.parametrize("key", ["digest", "chosen"])
def test_one_label_means_one_source(tmp_path, key):
    one, other = {f"source__{key}": "one"}, {f"source__{key}": "other"}
    with pytest.raises(ValueError, match=r"differ in the (source images|choice of source images) of 'tent'"):
        report.make([save(tmp_path, [record("tent", **one), record("tent", seed=1, episode__digest="b", **other)])])
    made = report.make([save(tmp_path, [record("tent", **one), record("tent", seed=1, episode__digest="b")])])
    assert len(made.records) == 2  # an older record does not know it
    made = report.make([save(tmp_path, [record("tent", **one), record("bacs", **other)])])
    assert len(made.records) == 2  # another method, with another source value


def test_other_code_and_other_source_values_are_said(tmp_path):
    """Rounding makes other bits on another machine: no reason to refuse, but a reader should know."""
    made = [
        {"code": {"commit": letter * 40, "dirty": letter == "b"}, "source__values": {"stats": letter}}
        for letter in "ab"
    ]
    runs = [record("cafe", seed=seed, episode__digest=str(seed), **made[seed]) for seed in (0, 1)]
    notes = report.make([save(tmp_path, runs)], with_paper=False).tables[0].notes
    assert notes == (
        "cifar10 all-mixed: made by the code of commit aaaaaaaaaa, commit bbbbbbbbbb with changed files",
        "cifar10 all-mixed: the runs of cafe used 2 versions of its source values",
    )
    runs = [record("cafe", **made[0]), record("tent", **made[0])]
    assert report.make([save(tmp_path, runs)], with_paper=False).tables[0].notes == ()


def test_the_same_run_twice_with_different_sources_is_refused(tmp_path):
    runs = [record("tent", 0.5), record("tent", 0.6, source__groups_digest="other")]
    with pytest.raises(ValueError, match=r"line \d and .* line \d are both tent with seed 0 on mixed, but differ in"):
        report.make([save(tmp_path, runs)])


def test_one_label_means_one_set_of_options(tmp_path):
    runs = [record("tent"), record("tent", seed=1, episode__digest="b", config__lr=0.1)]
    with pytest.raises(ValueError, match=r"differ in the option `lr` of 'tent': 0.001 in .* but 0.1 in"):
        report.make([save(tmp_path, runs)])
    runs[1]["label"] = "tent lr=0.1"
    made = report.make([save(tmp_path, runs)])
    assert cells(made, "accuracy-offline", "tent lr=0.1") == ["50.00", "–"]  # the paper's number is for its own options
    assert len(columns(made.records)) == 1
