"""The dashboard: a page with its style and its script inside, without a build step and without outside resources."""

import base64
import hashlib
from functools import cache
from importlib import resources

FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#0072b2"/>'
    '<g fill="none" stroke="#fff" stroke-linecap="round"><path d="M4 22c5 0 5-12 9-12s4 9 8 9 4-6 7-6" '
    'stroke-width="2.6"/><path d="M4 26h24" stroke-width="1.8" opacity=".6"/></g></svg>'
)


@cache
def html(listed: bool = False) -> str:
    """The page of a model, or the one that lists several."""
    page = _part("models.html" if listed else "page.html")
    return page.replace("{{style}}", _style()).replace("{{script}}", _script(listed))


@cache
def csp(listed: bool = False) -> str:
    """The page's Content-Security-Policy: its own style, script and server, nothing else."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash(_script(listed)),
        "style-src": _hash(_style()),
        "connect-src": "'self'",
        "img-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _style() -> str:
    return _part("style.css")


def _script(listed: bool) -> str:
    return _part("draw.js") + _part("models.js" if listed else "page.js")


def _part(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
