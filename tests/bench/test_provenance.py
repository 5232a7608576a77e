"""Which code made a number: the commit of a checkout, and none where there is none."""

import subprocess
from pathlib import Path

import cafe_tta
from cafe_tta.bench import provenance

NOTHING = {"commit": None, "dirty": None}


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_commit_and_changes_of_a_checkout(tmp_path):
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert provenance.code_of(package) == NOTHING  # no checkout
    git(tmp_path, "init", "-q")
    assert provenance.code_of(package) == NOTHING  # a checkout that does not know the package: of something around it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert provenance.code_of(package) == clean
    (tmp_path / "notes.txt").write_text("not code")
    assert provenance.code_of(package) == clean
    (package / "new.py").write_text("x = 1")
    assert provenance.code_of(package) == clean | {"dirty": True}
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "second")
    (package / "__init__.py").write_text("x = 2")
    found = provenance.code_of(package)
    assert found["dirty"] and found["commit"] == git(tmp_path, "rev-parse", "HEAD") != clean["commit"]


def test_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.code_of(Path(cafe_tta.__file__).parent) == NOTHING
