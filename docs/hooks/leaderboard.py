"""A hook of mkdocs: the leaderboard of all committed records, as `leaderboard.html`."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from cafe_tta.bench.report import leaderboard

DOCS = Path(__file__).parents[1]
PAGE = "leaderboard.html"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    content = leaderboard.to_html(leaderboard.entries([DOCS / "results"]), DOCS / PAGE)
    files.append(File.generated(config, PAGE, content=content))
    return files
