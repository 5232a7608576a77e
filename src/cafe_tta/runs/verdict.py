"""What a run came to, in one sentence: which shift was seen, what adapting changed, and whose answers are given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cafe_tta.runs.measure import Measurement

HARDLY = 1.1  # drift up to which images that may well be source images are said to look like them
FAR = 2.0  # drift above which adapted features are still said to be far from the source's


@dataclass(frozen=True)
class Verdict:
    """Everything that the sentence tells.

    >>> found = Measurement(900, None, None, None, (3.416, 1.012), group_frechet=(15.9, 2.8), like_source=False)
    >>> print(Verdict("cafe-plus", 900, found, changed=(414, 900), clusters=[500, 400], steps=4).sentence)
    The images differ from the source images (drift 3.42; 1 is like them), in 2 clusters of images that are corrupted
    alike; adapting brought their features closer to the source's (Fréchet distance of groups 15.9 -> 2.8) and changed
    the answer to 414 of 900 images (46%); predictions.csv has the adapted model's answers, which nothing speaks
    against.
    """

    method: str
    images: int
    measurement: Measurement | None
    changed: tuple[int, int] | None = None  # images whose answer is not the source model's, of how many
    clusters: Sequence[int] = ()  # sizes of the clusters of a method that unmixes
    steps: int = 0
    why_no_step: str = ""
    judged: bool = True  # whether the source model answers where the adapted one is worse
    adapts: bool = True  # False for a baseline that only answers
    applied: bool = False  # a saved state answered, and nothing was adapted

    @property
    def worse(self) -> str:
        """Why the adapted model's answers should not be used; empty where nothing speaks against them."""
        moved = self.adapts and (self.steps > 0 or self.applied)
        return self.measurement.worse if moved and self.measurement is not None else ""

    @property
    def answers(self) -> str:
        """Whose answers are given: `adapted` or `source`."""
        return "source" if not self.adapts or (self.worse and self.judged) else "adapted"

    @property
    def sentence(self) -> str:
        return f"{'; '.join(filter(None, (self._shift(), self._effect(), self._choice())))}."

    def summary(self) -> dict[str, Any]:
        """As JSON."""
        changed = None if self.changed is None else {"images": self.changed[0], "of": self.changed[1]}
        return {"answers": self.answers, "worse": self.worse or None, "changed": changed, "verdict": self.sentence}

    def _shift(self) -> str:
        found, count = self.measurement, len(self.clusters)
        if found is None:
            return "How far the images are from the source images was not measured"
        if found.drift is None:
            why = "there are too few" if found.alignment is not None else "there are no source statistics"
            return f"How far the images are from the source images cannot be told: {why}"
        drift = f"drift {found.drift[0]:.2f}; 1 is like them"
        if found.like_source and found.drift[0] <= HARDLY:
            return f"The images look like the source images ({drift})"
        kinds = f", in {count} clusters of images that are corrupted alike" if count > 1 else ""
        if found.like_source is None:
            return f"How far the images are from the source images is uncertain ({drift}){kinds}"
        how = "hardly differ " if found.drift[0] <= HARDLY else "differ a little " if found.like_source else "differ "
        return f"The images {how}from the source images ({drift}){kinds}"

    def _effect(self) -> str:
        if not self.adapts:
            return ""
        if self.steps or self.applied:
            what = filter(None, (self._closer(), self._changed("changed the answer to")))
            done = " and ".join(what)
            return done and f"{'the saved state' if self.applied else 'adapting'} {done}"
        seen = self.measurement is not None and self.measurement.like_source
        why = f" ({self.why_no_step})" if self.why_no_step and not seen else ""
        differs = self._changed("the answer differs from the source model's on")
        return f"no step was taken{why}{f', and {differs}' if differs else ''}"

    def _closer(self) -> str:
        if self.measurement is None or self.measurement.group_frechet is None:
            return ""
        before, after = (f"{value:.3g}" for value in self.measurement.group_frechet)
        if before == after:
            return f"left their features as far from the source's (Fréchet distance of groups {after})"
        way = "closer to" if float(after) < float(before) else "farther from"
        drift = self.measurement.drift
        far = f"; still far, with drift {drift[1]:.2f}" if drift is not None and drift[1] > FAR else ""
        return f"brought their features {way} the source's (Fréchet distance of groups {before} -> {after}{far})"

    def _changed(self, verb: str) -> str:
        if self.changed is None:
            return ""
        count, of = self.changed
        share = f" ({count / of:.0%})" if count >= 0.01 * of else " (under 1%)" if count else ""
        images = f"{of} image{'' if of == 1 else 's'}{'' if of == self.images else ' that were measured'}"
        return f"{verb} {count or 'none'} of {images}{share}"

    def _choice(self) -> str:
        file = "predictions.csv has"
        if not self.adapts:
            return f"{file} the source model's answers: {self.method} does not adapt"
        if self.worse:
            if self.judged:
                return f"{file} the source model's answers, because the adapted one is worse: {self.worse}"
            return f"{file} the adapted model's answers, although it is worse than the source model: {self.worse}"
        if self.changed is not None and not self.changed[0] and self.changed[1] == self.images:
            return f"{file} the adapted model's answers, the same as the source model's"
        return f"{file} the adapted model's answers, which nothing speaks against"
