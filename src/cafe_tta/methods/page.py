"""What every method can do, as a table and as a page: docs/methods.md is `cafe-tta methods --markdown`."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cafe_tta.adapter import Adapter
from cafe_tta.methods import METHODS
from cafe_tta.traits import LAYERS

HEADS = ("method", "needs", "moves", "passes", *LAYERS, "keeps", "as one", "licence")
MEANINGS = f"""\
- needs: what it takes from the source domain (`cafe-tta stats --kind …`).
- moves: what adapting changes. passes: forward / backward passes over a batch, the answer included.
- {", ".join(LAYERS)}: the fewest images that it learns from in classifiers with such layers. Fewer are
  answered without a step, and `adapter.report.reason` says so. –: such classifiers are refused.
- keeps: what it remembers of the stream, beside what moves, its optimiser and BatchNorm's running statistics. With the
  default options, nothing grows with the stream.
- as one: whether many processes can adapt as one ([scale.md](scale.md)).
- licence: that of the authors' code, where there is any that we know of. Ours is written from the formulas, and MIT."""
COMPOSITION = """\
Methods with gradient steps share these options, and any value goes with any other, but for the exceptions below:

| option | values |
|---|---|
| `normalisation` | `batch`, `source`, `blend`, `slow` (RoTTA's), `unmix` (ours), `unmix-tns` |
| `max_entropy` | the entropy filter: only images with less entropy than this share of ln C are learnt from |
| `entropy` | `softmax` or `come` (COME's opinions): of `tent`, `eta`, `eata`, `rdumb`, `sar`, `deyo`, `moetta` |
| `reset_every` | back to the source after this many batches: `rdumb` is `eta` with 1000 |
| `parameters`, `adapt_from` | what moves |
| `optimizer`, `momentum`, `nesterov`, `weight_decay`, `max_change` | the step |
| `answer`, `every` | which logits are returned; how often a step is taken |

So `cafe_tta.create("roid", classifier, stats, normalisation="unmix")` and
`cafe_tta.create("cafe", classifier, stats, max_entropy=0.4)` are methods too. With `batch`, running
statistics follow the stream, for `predict` and `answer="after-eval"`; most of the originals drop them. Refused, with a
reason:

- `normalisation="unmix"` without the styles of the source images: those of `stats`, or, for a method that needs another
  value of the source, `styles=stats.styles`. `unmix-tns` without BatchNorm layers.
- `answer` and `every` for `cotta`; those, `normalisation` and `max_entropy` for `rotta`: their teacher answers.
- `parameters="all"` for `eata`, whose Fisher information is that of the normalisation layers.
- Where many processes adapt as one: `normalisation="unmix-tns"`, and `max_entropy` but for `eta`, `eata` and `rdumb`.
- `nesterov` with Adam, or without momentum."""


def capabilities(name: str, kind: type[Adapter]) -> tuple[str, ...]:
    """A row of the table: one text for each of HEADS."""
    as_one, traits = "yes" if kind.distributed else "no", kind.traits
    if traits is None:
        return name, kind.needs or "nothing", "?", "?", *("?" for _ in LAYERS), "?", as_one, "?"
    told = (traits.moves, traits.passes, *traits.batches, traits.keeps, as_one, traits.licence or "–")
    return name, kind.needs or "nothing", *told


def summary(kind: type[Adapter]) -> str:
    """The first paragraph of a method's docstring."""
    return told(kind).split("\n\n")[0].replace("\n", " ")


def preset_changes(kind: type[Adapter]) -> dict[str, dict[str, Any]]:
    """What every preset changes."""
    usual = asdict(kind.Config())
    return {
        name: {key: value for key, value in asdict(config).items() if value != usual[key]}
        for name, config in kind.presets.items()
    }


def page(methods: Mapping[str, type[Adapter]] = METHODS) -> str:
    """The page, in Markdown."""
    rows = [HEADS, ("---",) * len(HEADS), *(capabilities(name, kind) for name, kind in methods.items())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    parts = ["# Methods", "Made by `cafe-tta methods --markdown`; `cafe-tta methods NAME` lists the options of one."]
    parts += ["## What each can do", table, MEANINGS, "## What goes together", COMPOSITION, "## One by one"]
    for name, kind in methods.items():
        parts += [f"### {name}", _origin(kind), told(kind), _presets(kind)]
    return "\n\n".join(part for part in parts if part) + "\n"


def told(kind: type[Adapter]) -> str:
    """A method's docstring without its example."""
    return (inspect.getdoc(kind) or "").partition(">>>")[0].rstrip()


def _origin(kind: type[Adapter]) -> str:
    """Paper and authors' code: what follows the first line of its module's docstring."""
    return (inspect.getdoc(inspect.getmodule(kind)) or "").partition("\n")[2].strip()


def _presets(kind: type[Adapter]) -> str:
    changes = {name: ", ".join(f"{k}={v}" for k, v in new.items()) for name, new in preset_changes(kind).items()}
    return "Presets: " + "; ".join(f"`{name}`{f' ({told})' if told else ''}" for name, told in changes.items()) + "."
