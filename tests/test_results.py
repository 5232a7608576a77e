"""The published numbers: every committed record has a command that makes it, and pages say what the records say."""

import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cafe_tta
from cafe_tta.bench.records import RECORDS, SETTINGS, read
from cafe_tta.cli import app
from cafe_tta.methods import METHODS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUESTIONS = [ROOT / "docs/results.md", *sorted((ROOT / "docs/questions").glob("*.md"))]
CODE = re.compile(r"^```sh\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)


@cache
def script(name: str):
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def declared():
    return script("reproduce").Declared.load()


@pytest.fixture(autouse=True)
def same_methods():
    """Methods from outside that a command names are forgotten after the test."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def planned(words, monkeypatch) -> list:
    """What `cafe-tta bench` would run."""
    found = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(importlib.import_module("cafe_tta.cli.bench"), "_run", lambda plan, *_: found.append(plan))
    result = CliRunner().invoke(app, list(words[1:]))
    assert result.exit_code == 0, result.output or result.exception
    return found


def test_every_committed_folder_is_declared():
    """And those in `superseded` that no later run has replaced: they have a command too."""
    places = {folder.name: folder.place for folder in declared().folders.values()}
    committed = {path.parent.name for path in RESULTS.glob(f"*/{RECORDS}")}
    assert committed == {name for name, place in places.items() if place.parent == RESULTS.relative_to(ROOT)}
    assert all((ROOT / place / RECORDS).exists() for place in places.values())


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob(f"*/{RECORDS}")))
def test_a_run_can_go_on_in_a_committed_folder(name):
    """Its settings are of this version, with everything that decides a number; else it belongs into `superseded`."""
    settings = json.loads((RESULTS / name / SETTINGS).read_text())
    assert settings["versions"]["cafe_tta"] == cafe_tta.__version__, "move it to superseded, with `made_by`"
    assert {"digest", "chosen"} <= settings["source"].keys()
    for record in read(RESULTS / name / RECORDS):
        assert record.right is not None and record.code and record.command


@pytest.mark.parametrize("name", sorted(declared().folders))
def test_the_declared_commands_make_the_committed_records(name, monkeypatch):
    """The same rows with the same options, seeds, protocols and corruptions: no more and no fewer."""
    folder = declared().folders[name]
    plans = [plan for words in folder.commands for plan in planned(words, monkeypatch)]
    expected = {
        (protocol, plan.mode, row.label, seed): (plan, row)
        for plan in plans
        for protocol in plan.protocols
        for row in plan.rows
        for seed in plan.seeds
    }
    found = set()
    for record in folder.records():
        key = record.protocol, record.mode, folder.renamed.get(record.label, record.label), record.seed
        plan, row = expected[key]
        found.add(key)
        config = asdict(row.config)
        differing = {n: (v, config[n]) for n, v in record.config.items() if n in config and config[n] != v}
        assert not differing, f"{record.origin}: {differing}"
        assert record.limit == plan.limit and (record.frechet_after is not None) == plan.frechet
        assert set(record.corruptions["names"]) == set(plan.corruptions)
        assert record.corruptions["severities"] == list(plan.dataset.severities)
        assert (record.data["name"], record.source["data"]) == (plan.dataset.data, plan.dataset.source_data)
    assert found == set(expected)


def test_a_model_is_trained_before_it_is_used():
    commands = list(declared().commands(declared().chosen(["svhn-*"])))
    assert [words[1] for words in commands] == ["train", "bench", "bench"]
    assert commands[0][-1] == "models/svhn"


def test_data_that_are_missing_are_named_and_nothing_is_run(tmp_path, monkeypatch):
    module = script("reproduce")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "data/imagenet_first1000").mkdir(parents=True)
    (tmp_path / "data/imagenet_first1000/images.npy").touch()
    with pytest.raises(ValueError) as caught:
        module.run(declared(), declared().chosen(["imagenet-mixed"]), tmp_path / "again", None, False)
    assert "data/imagenet_second1000/images.npy: another one of each class" in str(caught.value)
    assert "data/resnet50_imagenet.safetensors: ResNet-50" in str(caught.value)
    assert "first1000" not in str(caught.value) and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected OUTPUT=DIR"),
        (["--output", "docs/results"], "expected OUTPUT to be a folder outside docs/"),
        (
            ["--output", "/tmp/never", "cifar11"],
            "expected names of folders, but got 'cifar11'; there are: cifar10-mixed",
        ),
    ],
)
def test_wrong_calls_are_refused(arguments, message):
    result = reproduce(*arguments)
    assert result.returncode and message in result.stderr


def test_help_says_which_data_are_expected_where():
    text = reproduce("--help").stdout
    assert all(f"data/{name}: " in text for name in declared().data)


def test_make_results_on_the_embedded_digits(tmp_path):
    """A model is trained, the benchmark runs with it, and the report is written; a second call has nothing to do."""
    call = ("--output", str(tmp_path), "--limit", "40", "--stand-in", "cifar100-plus-held-out")
    first = reproduce(*call)
    assert first.returncode == 0, first.stderr
    records = (tmp_path / "cifar100-plus-held-out" / RECORDS).read_text()
    assert [r.method for r in read(tmp_path / "cifar100-plus-held-out" / RECORDS)] == [
        "source", "unmix", "cafe", "cafe", "cafe-plus", "cafe-plus",
    ]  # fmt: skip
    assert (tmp_path / "cifar100-plus-held-out/report/index.html").exists()
    assert "not compared" in (tmp_path / "compare.md").read_text()
    assert reproduce(*call).returncode == 0
    assert (tmp_path / "cifar100-plus-held-out" / RECORDS).read_text() == records


def test_the_same_records_are_compared_as_equal(tmp_path):
    for name in ("unmix-cifar10-clean", "cifar10-dann"):
        shutil.copytree(ROOT / declared().folders[name].place, tmp_path / name)
    compare = script("reproduce").compare
    with_hits = compare(declared().folders["unmix-cifar10-clean"], tmp_path)
    assert "| cafe | 80.91 | 80.91 | +0.00 | 0 of 10,000 |" in with_hits
    assert "| dann | 62.40 | 62.40 | +0.00 | – |" in compare(declared().folders["cifar10-dann"], tmp_path)


def test_the_makefile_hands_on_what_it_is_given():
    arguments = ["OUTPUT=again", "LIMIT=50", "STAND_IN=1", "NAMES=unmix-* cifar10-dann"]
    shown = subprocess.run(["make", "-n", "results", *arguments], cwd=ROOT, capture_output=True, text=True).stdout
    assert "docs/reproduce.py --output again --limit 50 --stand-in unmix-* cifar10-dann" in shown


def reproduce(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "docs/reproduce.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# Pages


def blocks(page: Path) -> list[str]:
    """The blocks of code of a page, with lines that go on joined and shell variables filled in."""
    found = []
    for fenced, indented in CODE.findall(page.read_text()):
        text = re.sub(r"\\\n *", "", inspect.cleandoc(fenced or indented))
        for name, value in re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE):
            text = re.sub(rf"\${name}\b", lambda _, value=value: value, text)
        found.append(text)
    return found


def commands(page: Path) -> list[str]:
    """The lines that run a command, without comments."""
    lines = [line for block in blocks(page) for line in block.splitlines()]
    started = re.compile(r"(?:\w+=\S+ )*(?:cafe-tta|torchrun|python|make|mkdocs) ")
    return [line.partition(" #")[0] for line in lines if started.match(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_docs_are_complete(page):
    assert not [line for line in commands(page) if "…" in line or "..." in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_that_writes_to_docs_results_is_the_declared_one(page):
    known = {words for folder in declared().folders.values() for words in map(frozenset, folder.commands)}
    written = [shlex.split(line) for line in commands(page) if "--output docs/results/" in line]
    assert not [shlex.join(words) for words in written if frozenset(words) not in known]


def test_every_folder_is_shown_with_its_commands():
    written = [line for page in PAGES for line in commands(page) if "--output docs/results/" in line]
    shown = {frozenset(shlex.split(line)) for line in written}
    missing = [f.name for f in declared().folders.values() if not {*map(frozenset, f.commands)} <= shown]
    assert not missing, f"put `<!-- command: NAME -->` on a page for: {', '.join(missing)}"


@pytest.mark.parametrize("page", script("tables").pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_tables_and_commands_that_the_records_give(page):
    made = script("tables").filled(page.read_text(), declared())
    assert page.read_text() == made, "run: python docs/tables.py"


def test_every_table_is_on_a_page():
    named = re.compile(r"^<!-- table: (.+) -->$", re.MULTILINE)
    used = {name for page in PAGES for names in named.findall(page.read_text()) for name in names.split()}
    assert used == set(script("tables").TABLES)


@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_accuracies_in_the_text_stand_in_a_table(page):
    """Numbers with two digits after the point and two before it, but those of an audit and of superseded records."""
    rows = [line for path in QUESTIONS for line in path.read_text().splitlines() if line.startswith("|")]
    cells = {number for row in rows for number in re.findall(r"\d+\.\d\d\b", row)}
    text = re.sub(r"^\|.*$|^ {4}.*$", "", page.read_text(), flags=re.MULTILINE)
    paragraphs = [part for part in text.split("\n\n") if "audit" not in part and "superseded" not in part]
    numbers = {number for part in paragraphs for number in re.findall(r"\b\d\d+\.\d\d\b", part)}
    assert numbers <= cells


def test_a_changed_record_would_change_the_page(monkeypatch):
    """What the test above compares is really read from the records."""
    tables = script("tables")
    text = tables.TABLES["same"]()
    column = tables.column("cifar10-same")
    worse = [replace(record, accuracy=record.accuracy - 0.01) for record in column.records]
    monkeypatch.setattr(tables, "column", lambda *_: replace(column, records=tuple(worse)))
    assert "| source | **82.90** |" in text and "| source | **81.90** |" in tables.TABLES["same"]()
