"""A hook of mkdocs: links that leave docs/ for another file of the repository lead to a page that shows that file.

So the same link works in the repository and on the site: `[styles.py](../src/cafe_tta/styles.py)` becomes the page
`repository/src/cafe_tta/styles.py`. Links to folders become plain text. Links to files that do not exist stay as they
are, and `mkdocs build --strict` refuses them.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^]\[]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")  # of a picture too; no address with a scheme
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".service": "ini"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file outside docs/ that pages link to, and for those that they link to in turn."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while waiting:
        origin, text = waiting.pop()
        for path in linked_files(origin, text):
            if files.get_file_from_path(page_of(path)) is None:
                content = content_of(path)
                files.append(File.generated(config, page_of(path), content=content))
                waiting.append((path, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page to where their targets are on the site."""
    own = page.file.src_uri
    inside = own.removeprefix("repository/") if own.startswith("repository/") else f"docs/{own}"

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], resolved(inside, match[2]), match[3] or ""
        if (ROOT / target).is_dir():
            return text
        if not (ROOT / target).is_file():
            return match[0]
        return f"[{text}]({posixpath.relpath(page_of(target), posixpath.dirname(own) or '.')}{anchor})"

    return LINK.sub(rewritten, markdown)


def linked_files(origin: str, text: str) -> Iterator[str]:
    """The files outside docs/ that a text links to; `origin` is where it stands in the repository."""
    for match in LINK.finditer(text):
        target = resolved(origin, match[2])
        if not target.startswith(("docs/", "..")) and not target.endswith(PICTURES) and (ROOT / target).is_file():
            yield target


def resolved(origin: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def page_of(path: str) -> str:
    """Where the site shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def content_of(path: str) -> str:
    """A file as Markdown: text as it is, notebooks cell by cell, code in a block."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(part for cell in json.loads(text)["cells"] for part in cell_parts(cell))
    return f"# {path}\n\n{fenced(text, LANGUAGES.get(Path(path).suffix, 'text'))}"


def cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    """A cell of a notebook, with its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield fenced(source, "python")
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield f"![output](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
        elif "text/html" in data:
            yield "".join(data["text/html"])
        else:
            yield fenced("".join(output.get("text") or data.get("text/plain", "")), "text")


def fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"
