"""The leaderboard: which accuracies share a setting, what a line says, and a page that sorts by itself."""

import base64
import hashlib
import re

import pytest
from typer.testing import CliRunner

from cafe_tta.bench.report import leaderboard
from cafe_tta.cli import app

from ..serve.browser import browser, require_browser
from .report_records import record, save


@pytest.fixture
def folders(tmp_path):
    """Two folders of one setting, and a third with other weights."""
    seeds = [{"seed": seed, "episode__digest": str(seed)} for seed in (0, 1)]
    made = {"code": {"commit": "0123456789abcdef" * 2, "dirty": True}, "command": "cafe-tta bench mixed"}
    one = [record("source", 0.5, **seed) for seed in seeds] + [record("cafe", 0.625, **seeds[0], **made)]
    one.append(record("cafe", 0.615, **seeds[1], **made, calibration_error=0.1, forward_images=20000))
    save(tmp_path / "results/one", one)
    save(tmp_path / "results/two", [record("cafe", 0.6, needs="stats", config__lr=0.1, **seeds[0])])
    save(tmp_path / "results/three", [record("tent", 0.9, model__weights="other")])
    return tmp_path / "results"


def test_lines_by_setting_and_accuracy(folders):
    lines = leaderboard.entries([folders])
    found = [(entry.label, entry.accuracy.text(), entry.file.parent.name, entry.rank) for entry in lines]
    assert found == [
        ("cafe", "62.00 ± 0.71", "one", "best"),
        ("cafe", "60.00", "two", ""),
        ("source", "50.00 ± 0.00", "one", ""),
        ("tent", "90.00", "three", ""),  # alone in its setting
    ]
    assert [entry.setting.key for entry in lines[:3]] == [lines[0].setting.key] * 3 != lines[3].setting.key
    assert lines[0].setting.text == (
        "cifar10 (cifar10:test 0123456789): all-mixed (2 published corruptions, severity unknown), offline, "
        "timm:resnet26 fedcba9876, 10,000 images"
    )
    assert lines[0].code == "commit 0123456789 with changed files" and lines[0].worst[1].mean == pytest.approx(62)
    assert lines[0].calibration_error.seeds == (1,) and lines[0].cost.forward is None  # one record does not say


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "online"},
        {"protocol": "clean"},
        {"limit": 5},
        {"data__digest": "other"},
        {"model__preprocessing": {"size": 64}},
        {"corruptions__official_files": False},
        {"pace": {"setting": "3", "cost": 3.0, "missed": 1}},
    ],
)
def test_what_differs_is_another_setting(tmp_path, changes):
    save(tmp_path / "a", [record("tent")])
    save(tmp_path / "b", [record("cafe", **changes)])
    assert len({entry.setting.key for entry in leaderboard.entries([tmp_path / "a", tmp_path / "b"])}) == 2


def test_a_method_that_needs_source_data_is_never_best(tmp_path):
    runs = [record("source", 0.4), record("cafe", 0.6), record("dann", 0.9)]
    lines = leaderboard.entries([save(tmp_path, runs)])
    assert [(entry.label, entry.rank) for entry in lines] == [("dann", ""), ("cafe", "best"), ("source", "")]


def test_rows_without_all_episodes_are_left_out(tmp_path):
    def run(method, name):
        place = {"name": name, "images": 10000, "domains": {}, "digest": name}
        return record(method, protocol="separated", episode=place)

    runs = [run("tent", "fog-5"), run("tent", "snow-5"), run("cafe", "fog-5")]
    (line,) = leaderboard.entries([save(tmp_path, runs)])
    assert line.label == "tent" and line.setting.stream.endswith("2 episodes)")


def test_other_images_under_the_same_settings_are_refused(tmp_path):
    save(tmp_path / "a", [record("tent")])
    save(tmp_path / "b", [record("cafe", episode__digest="cd")])
    message = r"a/records.jsonl, line 1 and .*b/records.jsonl, line 1 have the same settings and seed, but other images"
    with pytest.raises(ValueError, match=message + r" \(ab and cd\); leave one of them out"):
        leaderboard.entries([tmp_path])
    with pytest.raises(ValueError, match="no finished run in"):
        leaderboard.entries([save(tmp_path / "empty", [])])


def test_the_page_links_to_records_and_runs_only_its_own_script(folders, tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    save(tmp_path / "a b", [record(label=evil, command=evil, dataset=evil)])
    result = CliRunner().invoke(
        app, ["report", "--leaderboard", str(folders), str(tmp_path / "a b"), "--output", str(tmp_path / "board.html")]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "board.html").read_text()
    assert page.count("<script") == 1 and "&lt;script&gt;alert(1)" in page
    assert set(re.findall(r'href="([^"]*)"', page)) == {
        "results/one/records.jsonl", "results/two/records.jsonl", "results/three/records.jsonl", "a%20b/records.jsonl",
    }  # fmt: skip
    script = re.search("<script>(.*?)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert "<code>cafe-tta bench mixed</code>" in page and "The command was not recorded." in page
    assert page.count("<strong>") == 1 and len(re.findall("<tr data-setting", page)) == 5


def test_the_output_is_one_page(folders):
    with pytest.raises(ValueError, match=r"expected `output` to be a file that ends in .html, but got .*results"):
        leaderboard.write([folders], folders)


def test_a_click_sorts_and_a_choice_filters(folders, tmp_path):
    require_browser()
    page = leaderboard.write([folders], tmp_path / "board.html")
    with browser() as driver:
        driver.get(page.as_uri())

        def column(number):
            rows = "[...document.querySelectorAll('tbody tr')].filter(row => !row.hidden)"
            return driver.execute_script(f"return {rows}.map(row => row.cells[{number}].textContent)")

        def click(head):
            place = leaderboard.HEADS.index(head)
            driver.execute_script(f"document.querySelectorAll('thead button')[{place}].click()")

        def choose(index):
            driver.execute_script(
                f"const s = document.querySelector('select'); s.selectedIndex = {index}; s.onchange()"
            )

        stream = "getComputedStyle(document.querySelector('thead .setting')).display"
        assert column(0) == ["cafe", "cafe", "source"]  # the setting with the most runs comes first
        assert driver.execute_script(f"return {stream}") == "none"  # its columns say the same in every line
        choose(0)
        driver.refresh()
        assert len(column(0)) == 4  # the address says so
        assert driver.execute_script(f"return {stream}") != "none"
        click("accuracy %")
        assert column(1) == ["50.00 ± 0.00", "60.00", "62.00 ± 0.71", "90.00"]
        click("accuracy %")
        assert column(1) == ["90.00", "62.00 ± 0.71", "60.00", "50.00 ± 0.00"]
        click("method")
        assert column(0) == ["cafe", "cafe", "source", "tent"]
        click("ECE %")
        assert column(9) == ["10.00", "–", "–", "–"]  # what is not known comes last
        choose(2)
        assert column(0) == ["tent"]
        driver.get(driver.current_url)  # which names the setting
        driver.refresh()
        assert column(0) == ["tent"]
        driver.get(f"{page.as_uri()}#gone")
        driver.refresh()
        assert len(column(0)) == 4
        assert not driver.get_log("browser")
