"""The docs site: it builds without a warning, loads nothing from elsewhere, and says only what is true of the code."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import cafe_tta as cafe
from cafe_tta.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESOURCES = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if "cafe-tta " in page.read_text()]
COMMAND = re.compile(r"^(?:OMP_NUM_THREADS=1 )?(?:cafe-tta|torchrun .*-m cafe_tta) (\w+) ?(.*)$", re.MULTILINE)
CODE = re.compile(r"^```sh\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
MESSAGES = re.findall(r"^ *> (.+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


class Page(HTMLParser):
    """The links, the anchors and the outside resources of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in RESOURCES and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values.get(RESOURCES[tag], ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_docs_is_on_the_site(site):
    missing = [page for page in DOCS.rglob("*.md") if not (site / page.relative_to(DOCS)).with_suffix(".html").exists()]
    assert not missing


def test_every_link_of_the_site_leads_somewhere(pages):
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            other = (path.parent / target).resolve() if target else path
            if other.is_dir():
                other /= "index.html"
            if not other.exists() or (anchor and other in pages and anchor not in pages[other].anchors):
                dead.append(f"{path.name}: {link}")
    assert not dead


def test_the_site_loads_nothing_from_elsewhere(site, pages):
    outside = re.compile(r"(?:https?:)?//")
    loaded = {f"{path.name}: {link}" for path, page in pages.items() for link in page.loaded if outside.match(link)}
    assert not loaded
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)]*", style.read_text()), style
    configured = (site / "index.html").read_text()
    assert "fonts.googleapis.com" not in configured and "unpkg.com" not in configured


def test_the_leaderboard_is_a_page_of_the_site_with_all_committed_records(site, pages):
    board = site / "leaderboard.html"
    linked = {(site / link).resolve() for link in pages[board].links}
    folders = {path.parent.name for path in (DOCS / "results").glob("*/records.jsonl")}
    assert {path.parent.name for path in linked} == folders and all(path.is_file() for path in linked)
    assert 'href="leaderboard.html"' in (site / "results.html").read_text()


def test_every_public_name_is_in_the_reference():
    documented = set(re.findall(r"^::: cafe_tta\.(\S+)$", _api_pages(), re.MULTILINE))
    public = {name for name, value in vars(cafe).items() if inspect.isclass(value) or inspect.isfunction(value)}
    missing = sorted(public - documented)
    assert not missing, f"write `::: cafe_tta.NAME` on a page of docs/api/ for: {', '.join(missing)}"


def test_every_command_is_in_the_reference():
    documented = set(re.findall(r"^::: cafe-tta (\S+)$", (DOCS / "commands.md").read_text(), re.MULTILINE))
    assert documented == {command.name or command.callback.__name__ for command in app.registered_commands}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist_with_their_flags(page):
    commands = typer.main.get_command(app).commands
    code = "\n".join(inspect.cleandoc(fenced or indented) for fenced, indented in CODE.findall(page.read_text()))
    for name, rest in COMMAND.findall(re.sub(r"\\\n *", "", code)):  # a backslash continues a line
        used = {word.split("=")[0] for word in rest.split("#")[0].split() if re.match(r"--\w", word)}
        known = {flag for option in commands[name].params for flag in (*option.opts, *option.secondary_opts)}
        assert used <= known, f"cafe-tta {name} has no {', '.join(used - known)}"


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(message):
    fragments = [fragment.strip() for fragment in message.split("…")]
    pattern = re.compile(r".*".join(map(re.escape, fragments)), re.DOTALL)
    assert any(pattern.search(text) for text in _texts_of_the_code()), message


def test_the_troubleshooting_page_quotes_many_messages():
    assert len(MESSAGES) > 30


@pytest.fixture(scope="module")
def repository_files():
    return _hook("repository_files")


@pytest.mark.parametrize(
    ("link", "page"),
    [
        ("[styles](../src/cafe_tta/styles.py#top)", "[styles](repository/src/cafe_tta/styles.py.md#top)"),
        ("[rules](../CONTRIBUTING.md)", "[rules](repository/CONTRIBUTING.md)"),
        ("[drift](drift.md#drift)", "[drift](drift.md#drift)"),
        ("[records](results/)", "records"),
        ("[gone](../src/gone.py)", "[gone](../src/gone.py)"),  # mkdocs then refuses it
        ("[paper](https://arxiv.org/abs/2204.13263)", "[paper](https://arxiv.org/abs/2204.13263)"),
    ],
)
def test_links_to_files_of_the_repository_lead_to_their_pages(repository_files, link, page):
    here = SimpleNamespace(file=SimpleNamespace(src_uri="unmix.md"))
    assert repository_files.on_page_markdown(link, here, None, None) == page


def test_a_notebook_becomes_text_code_and_outputs(repository_files):
    shown = repository_files.content_of("examples/digits.ipynb")
    assert shown.startswith("# CAFe and unmixing") and "````python\nadapters[" in shown
    assert "(data:image/png;base64," in shown and "<caption>SourceStats</caption>" in shown


def test_the_reference_shows_signature_docstring_options_and_methods():
    reference = _hook("reference")
    shown = reference.documented("cafe_tta.CAFeConfig")
    assert "| `eigenvalue_floor` | ε: smaller source eigenvalues" in shown and "options of `StepConfig`" in shown
    assert "```python\ncafe_tta.drift(" in reference.documented("cafe_tta.drift")
    assert "#### reset { #cafe_tta.Adapter.reset }" in reference.documented("cafe_tta.Adapter")
    with pytest.raises(ValueError, match="expected the name of an object, but nothing is called cafe_tta.Gone"):
        reference.documented("cafe_tta.Gone")


def _hook(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"hooks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _api_pages() -> str:
    return "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))


@cache
def _texts_of_the_code() -> tuple[str, ...]:
    """Every text in the sources, with a gap where a value is filled in."""
    return tuple(text for path in (ROOT / "src").rglob("*.py") for text in _texts(ast.parse(path.read_text())))


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else " \0 " for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield " ".join(_texts(node.left)) + " ".join(_texts(node.right))
