"""Short texts for objects that hold many numbers: one line as `repr`, a small table in notebooks."""

from collections.abc import Mapping
from html import escape
from typing import Any


class Displayed:
    """An object that shows its `facts` instead of its tensors.

    >>> class Cup(Displayed):
    ...     def facts(self):
    ...         return {"size": "0.2 l", "sugar": None}
    >>> Cup()
    <Cup: size 0.2 l>
    >>> Cup()._repr_html_()
    '<table><caption>Cup</caption><tr><th>size</th><td>0.2 l</td></tr></table>'
    """

    def facts(self) -> Mapping[str, Any]:
        """What to show, by name; what is None or empty is left out."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(f'{name} {value}' for name, value in self._known().items())}>"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{escape(n)}</th><td>{escape(str(v))}</td></tr>" for n, v in self._known().items())
        return f"<table><caption>{escape(type(self).__name__)}</caption>{''.join(rows)}</table>"

    def _known(self) -> dict[str, Any]:
        return {name: value for name, value in self.facts().items() if value is not None and value != ""}
