"""Copies in arrays, and jobs that are stopped, from Python and through the command."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cafe_tta import copies, corruptions, data
from cafe_tta.cli import app
from cafe_tta.copies import arrays

runner = CliRunner()


def run(*args, code=0):
    """Runs the command in this process; if it fails, it must say why in one line."""
    result = runner.invoke(app, ["corrupt", *map(str, args)])
    assert result.exit_code == code, result.output
    if code == 2:
        assert re.fullmatch(r"error: .+\n", result.stderr), result.stderr
    return result


def process(*args):
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "cafe_tta", "corrupt", *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
    return found


def test_all_five_severities_of_an_array_are_the_published_layout(tmp_path):
    run("--data", "digits:test", "--output", tmp_path / "c", "--corruptions", "fog,shot_noise", "--limit", 20)
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert names == {"fog.npy", "shot_noise.npy", "labels.npy", "settings.json", "contact-sheet.png"}
    fog, labels = np.load(tmp_path / "c/fog.npy"), np.load(tmp_path / "c/labels.npy")
    assert fog.shape == (100, 32, 32, 3) and fog.dtype == np.uint8
    assert labels.shape == (100,) and labels.dtype == np.uint8
    digits = data.load("digits:test")
    chosen = np.sort(np.random.default_rng(0).permutation(896)[:20])
    for severity in range(1, 6):
        expected = corruptions.corrupt(digits.images(chosen.tolist()), "fog", severity, indices=chosen)
        np.testing.assert_array_equal(fog[20 * severity - 20 : 20 * severity], expected)
    found = data.load(f"cifar10-c@{tmp_path / 'c'}")
    assert found.labels.tolist() == digits.labels[chosen].tolist() and found.classes == digits.classes
    np.testing.assert_array_equal(found.corrupted([3], "fog", 5), fog[83:84])


def test_some_severities_are_read_again_too(tmp_path):
    run(
        "--data",
        "digits:test",
        "--output",
        tmp_path / "c",
        "--corruptions",
        "contrast",
        "--severity",
        "2,5",
        "--limit",
        9,
    )
    found = data.load(f"cifar10-c@{tmp_path / 'c'}")
    assert (found.severities(), len(found)) == ((2, 5), 9)
    both = np.load(tmp_path / "c/contrast.npy")
    np.testing.assert_array_equal(found.corrupted([8], "contrast", 5), both[17:18])


def test_the_layout_arrays_is_a_folder_for_every_domain(tmp_path):
    options = ("--corruptions", "fog", "--severity", "1-2", "--limit", 7, "--layout", "arrays", "--no-contact-sheet")
    said = run("--data", "digits:test", "--output", tmp_path / "c", *options).stdout
    assert f"arrays:{tmp_path}/c/fog-2" in said and not (tmp_path / "c/contact-sheet.png").exists()
    fog = data.load(f"arrays:{tmp_path}/c/fog-2")
    assert len(fog) == 7 and fog.classes == tuple("0123456789") and fog.labels is not None


def test_a_killed_run_goes_on_and_other_processes_make_the_same(tmp_path):
    """kill -9 of a run with two workers: they end too; what was finished stays; the rest is made by one process."""
    output = tmp_path / "c"
    child = process("--data", "digits:test", "--output", output, "--workers", 2, "--severity", "1-5")
    wait_for(lambda: child.poll() is not None or len(list(output.glob("*_noise.npy"))) >= 2)
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.kill()
    child.communicate()
    wait_for(lambda: not any(_runs(worker) for worker in workers), 10)
    finished = {path: path.stat().st_mtime_ns for path in output.glob("*.npy")}
    assert 2 <= len(finished) < 16 and (output / ".unfinished").is_dir()
    run("--data", "digits:test", "--output", output)
    assert not (output / ".unfinished").exists()
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    digits = data.load("digits:test")
    for name in corruptions.NAMES:
        made = np.load(output / f"{name}.npy")
        assert made.shape == (5 * 896, 32, 32, 3)
        for severity in (1, 5):
            expected = corruptions.corrupt(digits.array[-50:], name, severity, indices=np.arange(846, 896))
            np.testing.assert_array_equal(made[896 * severity - 50 : 896 * severity], expected)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_blocks_of_a_stopped_run_are_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 3072 * 10)
    options = (
        "--data",
        "digits:test",
        "--output",
        tmp_path / "c",
        "--corruptions",
        "fog",
        "--severity",
        3,
        "--limit",
        95,
    )
    real, calls = corruptions.corrupt, []

    def counted(images, *args):
        calls.append(len(images))
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return real(images, *args)

    monkeypatch.setattr(arrays.corruptions, "corrupt", counted)
    assert "No space left" in run(*options, code=2).stderr
    assert len(list((tmp_path / "c/.unfinished").glob("*.block"))) == 4
    calls[:] = [0] * 5
    run(*options)
    assert calls[5:] == [10, 10, 10, 10, 10, 5]
    chosen = np.sort(np.random.default_rng(0).permutation(896)[:95])
    expected = real(data.load("digits:test").images(chosen.tolist()), "fog", 3, indices=chosen)
    np.testing.assert_array_equal(np.load(tmp_path / "c/fog.npy"), expected)


def test_a_polite_stop_says_how_to_go_on(tmp_path):
    child = process("--data", "digits", "--output", tmp_path / "c")
    wait_for(lambda: child.poll() is not None or (tmp_path / "c/shot_noise.npy").exists())
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert re.fullmatch(r"interrupted: \d+ of 134775 copies made; the same command goes on\n", said)


def test_python_makes_the_same_copies_and_continues_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 3072 * 10)
    digits = data.load("digits:test")
    options = {"corruptions": ["fog", "contrast"], "severities": [2, 5], "limit": 25, "layout": "arrays"}
    amounts = []

    def stop_early(amount):
        amounts.append(amount)
        if len(amounts) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copies.make(digits, tmp_path / "a", advance=stop_early, **options)
    assert amounts == [10, 10, 5]
    amounts.clear()
    made = copies.make(digits, tmp_path / "a", advance=amounts.append, **options)
    assert sum(amounts) == 100 and made.left_out == () and made.contact_sheet == tmp_path / "a/contact-sheet.png"
    assert made.settings.corruptions == ("fog", "contrast") and made.settings.severities == (2, 5)
    flags = ("--corruptions", "fog,contrast", "--severity", "2,5", "--limit", 25, "--layout", "arrays")
    run("--data", "digits:test", "--output", tmp_path / "b", *flags)
    for path in tmp_path.glob("b/*/*"):
        assert (tmp_path / "a" / path.relative_to(tmp_path / "b")).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="was made with other settings: seed=0 there, 1 here; choose another `output`"):
        copies.make(digits, tmp_path / "a", seed=1, **options)


def test_worker_processes_need_an_image_set_that_can_be_loaded(tmp_path):
    nameless = data.ArraySet("mine", data.load("digits:test").array[:4])
    with pytest.raises(ValueError, match="expected an image set that worker processes can load, but 'mine' is not one"):
        copies.make(nameless, tmp_path / "c", corruptions="fog", workers=2)
    assert copies.make(nameless, tmp_path / "c", corruptions="fog", contact_sheet=False).contact_sheet is None
    with pytest.raises(ValueError, match="expected `workers` to be at least 1, but got 0"):
        copies.make(nameless, tmp_path / "c", corruptions="fog", workers=0)
    with pytest.raises(ValueError, match="expected `layout` to be one of .* but got 'folders'; did you mean 'folder'"):
        copies.make(nameless, tmp_path / "c", layout="folders")
