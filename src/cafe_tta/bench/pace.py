"""Time-limited evaluation: the stream does not wait, and a slow method misses batches.

Alfarra et al., Evaluation of test-time adaptation under computational time constraints, ICML 2024.
https://arxiv.org/abs/2304.04795

Batches come at the pace at which the model without adaptation answers them. A method that needs as long as k plain
forward passes for a batch adapts to one, and misses the batches that come while it is busy: those are answered by the
model that it has made so far, without adapting. A batch waits for a busy method until the next one comes: so the method
learns from one batch in k, also where k is no whole number. (The paper rounds k up.)
"""

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cafe_tta import stream
from cafe_tta.adapter import Adapter
from cafe_tta.classifier import SplitClassifier
from cafe_tta.options import split_assignments
from cafe_tta.stream import Answer, B, Evaluation

MEASURED = "measured"
REPEATS = 3  # of the forward pass that the pace is measured with
EXPECTED = "expected `pace` to be 'measured', a cost such as 3, or costs of methods such as tent=3,cafe=4"


@dataclass(frozen=True)
class Pace:
    """What a batch costs a method, in plain forward passes: the same for all, by method, or measured (None).

    >>> Pace.parse("3").cost("tent"), Pace.parse("tent=2.5,cafe=4").cost("cafe"), Pace.parse("measured").cost("tent")
    (3.0, 4.0, None)
    """

    text: str
    costs: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> "Pace":
        if text == MEASURED:
            return Pace(text)
        try:
            named = {"": text} if "=" not in text else split_assignments(text.split(","), example="tent=3")
            costs = {name: float(cost) for name, cost in named.items()}
        except ValueError:
            raise ValueError(f"{EXPECTED}, but got {text!r}") from None
        if not all(math.isfinite(cost) and cost > 0 for cost in costs.values()):
            raise ValueError(f"{EXPECTED}, all above 0, but got {text!r}")
        return Pace(text, costs)

    def cost(self, label: str) -> float | None:
        """Of a row, by its label, or by its method's name; None where it is measured."""
        if self.text == MEASURED:
            return None
        found = self.costs.get("", self.costs.get(label, self.costs.get(label.partition("(")[0])))
        if found is None:
            raise ValueError(
                f"expected a cost of {label} in `pace`, but got {self.text!r}; write {label}=…, or measured"
            )
        return found


class Clock:
    """When a method is busy. Time is counted in batches: one comes in each plain forward pass."""

    def __init__(self, cost: float | None, classifier: SplitClassifier) -> None:
        self.cost = cost
        self.missed = 0  # images
        self._classifier = classifier
        self._forward: float | None = None  # seconds
        self._costs: list[float] = []
        self._free = 0.0  # when it can take a batch again

    @property
    def mean_cost(self) -> float:
        """Of the batches that it adapted to."""
        return statistics.fmean(self._costs)

    def answers(self, adapter: Adapter, batches: Iterable[B]) -> Iterator[Answer[B] | Evaluation[B]]:
        """Adapts to those batches that there is time for, and answers the others with what the adapter has learnt."""
        for arrival, batch in enumerate(batches):
            if self._free >= arrival + 1:  # the next one comes before it is free
                self.missed += len(batch.images)
                yield from stream.evaluate(adapter, [batch])
                continue
            for answer in stream.adapt(adapter, [batch]):
                cost = answer.seconds / self._plain(batch) if self.cost is None else self.cost
                self._costs.append(cost)
                self._free = max(arrival, self._free) + cost
                yield answer

    def _plain(self, batch: B) -> float:
        """Seconds of a plain forward pass; that of the first batch, which is a whole one."""
        if self._forward is None:
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                list(stream.evaluate(self._classifier, [batch]))
                times.append(time.perf_counter() - start)
            self._forward = statistics.median(times)
        return self._forward
