"""The benchmark as a whole: records, resume after any interruption, refusal to mix settings, the same numbers twice."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import cafe_tta as cafe
from cafe_tta import bench
from cafe_tta.bench import evaluate, protocols, provenance, source_side
from cafe_tta.bench import records as records_module
from cafe_tta.bench.experiments import DATASETS, EXPERIMENTS, Experiment, plan
from cafe_tta.bench.protocols import PROTOCOLS
from cafe_tta.bench.records import Record, Results, read
from cafe_tta.bench.runner import Runner
from cafe_tta.bench.source_side import SourceSide
from cafe_tta.cli.app import app
from cafe_tta.methods import METHODS

from .report_records import record as made_up_record

ROOT = Path(__file__).parents[2]
DIGITS = replace(DATASETS["digits"], copies=1)


@pytest.fixture(scope="module")
def source_folder(tmp_path_factory):
    """The embedded model, trained for a moment."""
    folder = tmp_path_factory.mktemp("source")
    training = source_side.DIGITS_TRAINING
    source_side.DIGITS_TRAINING = replace(training, epochs=2, swag_epochs=1)
    try:
        source = SourceSide(DIGITS, folder)
        source.grouped(), source.value("histograms"), source.value("posterior")
    finally:
        source_side.DIGITS_TRAINING = training
    return folder


@pytest.fixture
def results(source_folder, tmp_path):
    """A folder for results that has its source side already."""
    shutil.copytree(source_folder, tmp_path / "results" / "source")
    return tmp_path / "results"


def make_runner(folder, methods=("source", "adabn", "cafe"), kind="mixed", **settings):
    settings = {"seeds": (0, 1), "limit": 40} | settings
    return Runner(plan(kind, DIGITS, methods=list(methods), **settings), SourceSide(DIGITS, folder / "source"), folder)


def without_times(records):
    """Without what no two runs have in common: times, the command line, which names the folder, and changed files."""
    times = {"seconds": 0.0, "peak_memory_mb": None, "run_memory_mb": None}
    return [replace(record, **times, finished="", command="", origin="", code={}) for record in records]


def test_every_record_holds_all_that_decides_its_number(results):
    runner = make_runner(results)
    runner.work()
    records = read(results / "records.jsonl")
    assert len(records) == 6 and len(runner.missing()) == 0
    for record in records:
        assert record.config == asdict(cafe.METHODS[record.method].presets["cifar"])
        assert record.protocol == "all-mixed" and record.mode == "offline" and record.seed in (0, 1)
        assert record.episode.images == 40 and sum(record.episode.domains.values()) == 40
        assert record.data["digest"] and record.model["weights"] and record.model["preprocessing"]["size"] == 32
        assert record.versions["torch"] and record.machine["threads"] >= 1
        assert 0 <= record.accuracy <= 1 and record.frechet_before > 0 and record.frechet_after > 0
        assert record.seconds > 0 and record.peak_memory_mb > 50 and len(record.stream) == 1  # too few for a curve
        assert record.code == provenance.code() and record.right.mean() == pytest.approx(record.accuracy)
        assert 0 <= record.calibration_error <= 1
        assert record.source["digest"] == cafe.data.load("digits:train").digest() and record.source["chosen"]
        passes = {"source": (2, 0), "adabn": (2, 0), "cafe": (2, 1)}[record.method]  # offline: once more to answer
        assert (record.forward_images, record.backward_images) == tuple(40 * count for count in passes)
        shares = [record.by_domain[name] * count for name, count in record.episode.domains.items()]
        assert sum(shares) / 40 == pytest.approx(record.accuracy)
    unadapted = [record for record in records if record.method == "source"]
    for record in unadapted:
        assert record.frechet_after == pytest.approx(record.frechet_before, rel=1e-6)
    groups = next(record for record in records if record.method == "cafe").source
    assert sum(groups["group_sizes"]) + groups["dead_dims"] == 128 and groups["num_groups"] == 8


def test_hits_are_in_the_order_of_the_episode(results):
    runner = make_runner(results, ["source"], seeds=(0,))
    runner.work()
    (record,), (planned,) = read(results / "records.jsonl"), runner.runs()
    (batch,) = runner.stream(planned.episode).batches(40)
    expected = (runner.source.classifier(batch.images).argmax(1) == batch.labels).numpy()
    assert np.array_equal(record.right, expected) and 0 < expected.sum() < 40
    named = {str(domain): expected[planned.episode.domain_of == n] for n, domain in enumerate(planned.episode.domains)}
    assert record.by_domain == {name: own.mean() for name, own in named.items() if len(own)}
    assert record.by_domain[record.worst_domain] == min(record.by_domain.values())


def test_every_source_value_has_its_hash(results):
    """The same value, the same hash; one number changed, another."""
    names = ["source", "fr", "bacs", "cafe", "eata", "tent(normalisation=unmix)"]
    runner = make_runner(results, names, seeds=(0,), frechet=False, limit=20)
    runner.work()
    found = {record.label: record.source for record in read(results / "records.jsonl")}
    kinds = [sorted(found[name]["values"]) for name in names]
    assert kinds == [[], ["histograms"], ["posterior"], ["stats"], ["fisher"], ["styles"]]
    assert found["bacs"]["swag"] == {"epochs": 4, "lr": 0.01} and "swag" not in found["cafe"]
    again = SourceSide(DIGITS, results / "source")
    rows = {planned.row.label: planned.row for planned in runner.runs()}
    assert {label: again.facts(row)["values"] for label, row in rows.items()} == {
        label: facts["values"] for label, facts in found.items()
    }
    moved = again.grouped()
    moved.mean[0] += 1e-4
    again._digests.clear()
    assert again.facts(rows["cafe"])["values"] != found["cafe"]["values"]
    swapped = replace(moved, groups=moved.groups[::-1], covs=moved.covs[::-1])
    runner.source._groups[8] = swapped
    assert runner._describe_source(rows["cafe"])["groups_digest"] != found["cafe"]["groups_digest"]


def test_a_posterior_of_other_options_is_not_taken(source_folder, results):
    """Kept files are named by the options they were collected with; another number of epochs makes another one."""
    bacs = next(row for row in plan("mixed", DIGITS, methods=["bacs"]).rows)
    digests = set()
    for epochs in (0, 1, 2, 1):  # 0: that of the embedded model
        side = SourceSide(DIGITS, results / "source", source_side.SourceSideOptions(swag_epochs=epochs))
        facts = side.facts(bacs)
        digests.add(facts["values"]["posterior"])
        assert facts["swag"]["epochs"] == (epochs or source_side.DIGITS_TRAINING.swag_epochs)
    assert len(digests) == 3


def test_second_run_gives_the_same_numbers(results, source_folder, tmp_path):
    make_runner(results).work()
    again = tmp_path / "again"
    shutil.copytree(source_folder, again / "source")
    make_runner(again).work()
    first, second = (without_times(read(folder / "records.jsonl")) for folder in (results, again))
    assert first == second


def test_interrupted_work_goes_on_without_repeating(results, monkeypatch):
    runner = make_runner(results)
    started = []

    def stop_at_the_fourth(planned):
        started.append(planned.key)
        if len(started) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.work(stop_at_the_fourth)
    assert len(read(results / "records.jsonl")) == 3
    resumed, later = make_runner(results), []
    resumed.work(lambda planned: later.append(planned.key))
    assert later == [planned.key for planned in resumed.runs()][3:]
    assert len({record.key for record in read(results / "records.jsonl")}) == 6


def test_killed_process_goes_on_and_ends_with_the_same_table(results, source_folder, tmp_path):
    """kill -9 in the middle; then the same command again; then the report of an undisturbed run."""
    command = [sys.executable, "-m", "cafe_tta", "bench", "mixed", "--limit", "60", "--seeds", "3"]
    command += ["--methods", "source,adabn,tent,infomax,cafe", "--output", str(results)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = results / "records.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = records.read_text().count("\n")
    assert 3 <= done < 15
    with records.open("a") as file:
        file.write('{"format": 1, "cut": "of')  # what a crash may leave
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert f"{done} of 15 runs are done already" in finished.stderr and "cut off by a crash" in finished.stderr
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(source_folder, undisturbed / "source")
    command[-1] = str(undisturbed)
    whole = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stderr
    assert finished.stdout.replace(str(results), "") == whole.stdout.replace(str(undisturbed), "")
    by_key = {record.key: record for record in without_times(read(undisturbed / "records.jsonl"))}
    assert {record.key: record for record in without_times(read(records))} == by_key


def test_other_settings_are_refused(results):
    make_runner(results, methods=["source"]).work()
    with pytest.raises(ValueError, match=r"settings.json belongs to other settings: limit=40 there, 50 here; choose"):
        make_runner(results, methods=["source"], limit=50)
    with pytest.raises(ValueError, match=r"experiment='mixed' there, 'same' here"):
        make_runner(results, methods=["source"], kind="same")
    changed = make_runner(results, methods=["source"], options={"source": {"batch_size": 7}})
    with pytest.raises(ValueError, match=r"config.batch_size=256 there, 7 here"):
        changed.missing()


def test_an_option_that_a_record_lacks_is_not_made_up(results):
    """`min_samples` did not exist when the record was made: nobody knows here what the run did."""
    make_runner(results, methods=["cafe"], seeds=(0,)).work()
    line = json.loads((results / "records.jsonl").read_text())
    del line["config"]["min_samples"]
    (results / "records.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError) as caught:
        make_runner(results, methods=["cafe"], seeds=(0, 1)).missing()
    assert str(caught.value) == (
        f"{results / 'records.jsonl'} (cafe, seed 0) was recorded by another version of cafe-tta (only one of the two "
        "versions knows config.min_samples), whose numbers may differ from new ones; choose another folder for new "
        "runs: `cafe-tta report` joins folders, where their runs can be compared"
    )


def test_a_folder_of_an_older_version_is_refused_as_such(results):
    make_runner(results, methods=["source"], seeds=(0,)).work()
    path = results / "settings.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"versions": {**settings["versions"], "cafe_tta": "0.1.0"}}))
    with pytest.raises(ValueError, match=r"recorded by another version of cafe-tta \(0.1.0 there, \d.* here\)"):
        make_runner(results, methods=["adabn"])
    old = {name: value for name, value in settings["source"].items() if name not in ("digest", "chosen")}
    path.write_text(json.dumps(settings | {"source": old}))
    with pytest.raises(ValueError, match=r"\(only one of the two versions knows source.chosen, source.digest\)"):
        make_runner(results, methods=["adabn"])
    with pytest.raises(ValueError, match=r"settings.json belongs to other settings: limit=40 there, 50 here; choose"):
        make_runner(results, methods=["adabn"], limit=50)  # what differs is said first


def test_records_of_older_versions_are_read():
    """Every folder of results in the docs: what their records lack is None, and not filled in."""
    folders = sorted(path.parent for path in (ROOT / "docs/results").rglob("records.jsonl"))
    assert len(folders) > 20
    for folder in folders:
        for record in read(folder / "records.jsonl"):
            assert record.accuracy >= 0 and record.origin
            if "digest" not in record.source:
                assert record.right is None and record.code == {} and record.calibration_error is None


def test_more_methods_and_seeds_are_added_to_what_is_there(results):
    make_runner(results, methods=["source"], seeds=(0,)).work()
    wider = make_runner(results, methods=["source", "adabn"], seeds=(0, 1))
    assert len(wider.runs()) == 4 and len(wider.missing()) == 3


def test_broken_records_are_an_error_that_names_the_line(tmp_path):
    Results(tmp_path, {"a": 1})
    (tmp_path / "records.jsonl").write_text('{"half": \n{"also": 1}\n')
    with pytest.raises(ValueError, match=r"records.jsonl, line 1 is not a JSON record"):
        Results(tmp_path, {"a": 1})


def test_records_without_settings_are_left_alone(tmp_path):
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has records.jsonl but no settings.json"):
        Results(tmp_path, {"a": 1})


def test_several_processes_write_to_one_file(tmp_path):
    """Each with a handle of its own, as ranks have; one of them crashes in the middle of a line."""

    def write(number):
        own = Results(tmp_path, {"a": 1})
        for run in range(20):
            if number == 0 and run == 10:
                with (tmp_path / "records.jsonl").open("a") as file:
                    file.write('{"cut": "of')
            padding = {"name": f"{number}", "images": 1, "digest": "x" * 10000}
            own.add(Record.from_json(made_up_record(seed=run, episode=padding)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = Results(tmp_path, {"a": 1})
    assert len(found) == len(read(tmp_path / "records.jsonl")) == 80 and not found.dropped


def test_a_file_that_stays_locked_is_an_error(tmp_path, monkeypatch):
    results = Results(tmp_path, {"a": 1})
    monkeypatch.setattr(records_module, "LOCKED", 0.1)
    calls = []
    results.waiting = lambda: calls.append(1)
    with (tmp_path / "records.jsonl").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="records.jsonl has been locked by another process for 0.1 s"):
            results.add(Record.from_json(made_up_record()))
    assert calls and (tmp_path / "records.jsonl").read_text() == ""


@pytest.mark.filterwarnings("ignore::cafe_tta.SourceWarning")  # few images for a single group
def test_sweep_over_the_number_of_groups_fills_every_cell(results):
    runner = make_runner(results, methods=["cafe"], kind="groups", sweep=(1, 8, 128), seeds=(0,))
    runner.work()
    records = read(results / "records.jsonl")
    assert [record.label for record in records] == ["cafe k=1", "cafe k=8", "cafe k=128"]
    assert [len(record.source["group_sizes"]) for record in records] == [1, 8, 128]
    assert all(np.isfinite(record.accuracy) and record.refused == 0 for record in records)


@pytest.mark.parametrize("kind", [name for name, kind in EXPERIMENTS.items() if "digits" in kind.datasets])
def test_every_experiment_runs_on_the_embedded_digits(results, kind):
    """The whole chain, small: records, tables, figures and the page."""
    arguments = ["bench", kind, "--limit", "12", "--seeds", "1", "--output", str(results)]
    arguments += ["--set", "dann.hidden=8"] if kind == "dann" else []
    arguments += ["--sweep", "4,32"] if kind == "groups" else []
    slow = kind in ("table1", "separated", "frechet", "online") or EXPERIMENTS[kind].mode == "online"
    arguments += ["--methods", "source,adabn,cafe"] if slow else []
    arguments += ["--protocols", "recurring(rounds=2)"] if kind == "recurring" else []
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["report", str(results)])
    assert result.exit_code == 0, result.output
    page = (results / "report" / "index.html").read_text()
    for record in read(results / "records.jsonl"):
        assert record.label in page
    assert list((results / "report" / "figures").glob("*.png"))


def test_methods_without_statistics_of_their_own_unmix(results, source_folder):
    """The same answers as an adapter that is made by hand with the styles."""
    names = ("infomax", "tent", "fr", "bacs")
    labels = [f"{name}(normalisation=unmix,batch_size=16)" for name in names]
    runner = make_runner(results, labels, seeds=(0,), mode="online", frechet=False)
    runner.prepare()
    runner.work()
    side = SourceSide(DIGITS, source_folder)
    needed = {"fr": side.value("histograms"), "bacs": side.value("posterior")}
    styles = side.grouped().styles
    for planned, record in zip(runner.runs(), read(results / "records.jsonl"), strict=True):
        config, source = planned.row.config, needed.get(record.method)
        by_hand = METHODS[record.method](side.classifier, source, config, styles=styles)
        outcome = evaluate.evaluate(by_hand, runner.stream(planned.episode), "online")
        assert record.accuracy == outcome.accuracy and by_hand.clusters.sizes
        assert record.needs == (METHODS[record.method].needs or "stats")


def test_online_experiments_use_the_papers_online_presets(results):
    chosen = plan("online", DIGITS)
    answers = {row.method: getattr(row.config, "answer", None) for row in chosen.rows}
    assert answers["cafe"] == "after-eval" and answers["adabn"] is None
    temperatures = [row.config.temperature for row in chosen.rows if row.method == "fr"]
    assert temperatures == [0.05] and chosen.mode == "online"


def test_imagenet_has_its_three_columns_and_presets():
    chosen = plan("table1", "imagenet")
    assert chosen.protocols == ("separated", "severity-mixed", "all-mixed")
    assert {row.method: row.config.batch_size for row in chosen.rows}["tent"] == 64
    assert len(chosen.episodes("separated", 0, 10)) == 75 and len(chosen.episodes("severity-mixed", 0, 10)) == 15


def test_unknown_names_are_answered_with_suggestions():
    with pytest.raises(ValueError, match=r"unknown experiment 'tabel1'; did you mean 'table1'\?; choose from: table1"):
        plan("tabel1", "digits")
    with pytest.raises(ValueError, match=r"unknown data set 'cifar'; did you mean 'cifar10\d?'\?"):
        plan("table1", "cifar")
    with pytest.raises(ValueError, match="experiment 'shift' is not for digits; choose from: mnist"):
        plan("shift", "digits")


def test_listing_tells_the_cost():
    result = CliRunner().invoke(app, ["bench", "--list"])
    assert result.exit_code == 0 and all(name in result.stdout for name in (*EXPERIMENTS, *PROTOCOLS))
    assert "where images of a class come together" in " ".join(result.stdout.split())
    assert any(unit in result.stdout for unit in (" s ", " min ", " h "))


def test_episodes_can_be_printed():
    result = CliRunner().invoke(app, ["bench", "mixed", "--show-episodes", "--limit", "30", "--seeds", "1"])
    assert result.exit_code == 0 and "fog-5" in result.stdout and "180" in result.stdout  # 30 images, 6 copies


def test_episode_digest_depends_on_order_and_corruption():
    episodes = [plan("mixed", DIGITS).episodes("all-mixed", seed, 50)[0] for seed in (0, 0, 1)]
    digests = [episode.summary().digest for episode in episodes]
    assert digests[0] == digests[1] != digests[2]


def test_settings_are_readable(results):
    make_runner(results, methods=["source"], seeds=(0,)).work()
    settings = json.loads((results / "settings.json").read_text())
    assert settings["corruptions"]["severities"] == [5] and settings["source"]["images"] == 901


def test_a_method_with_options_is_a_row_of_its_own():
    text = "source, cafe(normalisation=source,lr=0.01),cafe, tent(every=2)"
    labels = ["source", "cafe(normalisation=source,lr=0.01)", "cafe", "tent(every=2)"]
    chosen = plan("mixed", "digits", methods=text, options={"cafe": {"momentum": 0.5}})
    assert chosen == plan("mixed", "digits", methods=labels, options={"cafe": {"momentum": 0.5}})
    found = {row.label: row for row in chosen.rows}
    assert list(found) == labels
    config = found["cafe(normalisation=source,lr=0.01)"].config
    assert (config.normalisation, config.lr, config.momentum, config.samples_per_dim) == ("source", 0.01, 0.5, 1.25)
    assert (found["cafe"].config.normalisation, found["cafe"].config.momentum) == ("batch", 0.5)
    assert found["tent(every=2)"].method == "tent" and found["tent(every=2)"].config.every == 2
    with pytest.raises(ValueError, match="cafe has no option 'norm'"):
        plan("mixed", "digits", methods="cafe(norm=source)")


def test_other_corruptions_can_be_dealt():
    result = CliRunner().invoke(
        app, ["bench", "mixed", "--seeds", "1", "--limit", "40", "--corruptions", "held-out", "--show-episodes"]
    )
    assert "spatter-5" in result.output.replace("\n", "") and "fog" not in result.output


def test_a_protocol_is_one_value(results, monkeypatch):
    """A toy protocol, without a title and a colour, goes through the runner, the tables, the figures and the page."""

    def halves(num_images, corruptions, severities, seed, limit, copies):
        """Half of the images clean, then half of them foggy."""
        images = np.random.default_rng(seed).permutation(num_images)[:limit]
        domains = (protocols.CLEAN, protocols.Domain("fog", 5))
        return [protocols.Episode("halves", images, domains, (np.arange(len(images)) >= len(images) // 2).astype(int))]

    monkeypatch.setitem(PROTOCOLS, "halves", protocols.Protocol("halves", halves))
    monkeypatch.setitem(EXPERIMENTS, "halves", Experiment("halves", "clean, then fog", ("halves",)))
    toy = bench.plan("halves", DIGITS, methods=["source", "adabn"], seeds=(0,), limit=40)
    made = bench.run(toy, results)
    assert [(record.label, record.protocol) for record in made] == [("source", "halves"), ("adabn", "halves")]
    assert made[0].episode.domains == {"clean": 20, "fog-5": 20}
    paths = bench.report.write(bench.report.make([results]))
    assert "digits halves" in (results / "report" / "tables.md").read_text() and paths[0].parent == results / "report"
    assert "digits halves" in (results / "report" / "index.html").read_text()
    assert (results / "report" / "figures" / "frechet.png").stat().st_size > 5000
    assert bench.run(toy, results) == made  # nothing is done twice


def test_a_record_is_written_and_read_by_one_class(results, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/cafe-tta", "bench", "mixed", "--methods", "cafe(lr=0.1)"])
    runner = make_runner(results, methods=["adabn"], seeds=(0,))
    runner.work()
    (record,) = read(results / "records.jsonl")
    line = json.loads((results / "records.jsonl").read_text())
    assert line["command"] == record.command == "cafe-tta bench mixed --methods 'cafe(lr=0.1)'"
    assert json.loads(json.dumps(record.to_json())) == line
    assert Record.from_json(line, record.origin) == record
    assert line.keys() - {"format", "images_per_second"} == {field.name for field in fields(Record)} - {"origin"}
    page = bench.report.write(bench.report.make([results]))[3].read_text()
    assert "cafe-tta bench mixed --methods &#x27;cafe(lr=0.1)&#x27;" in page
