"""Notices when adapting comes to nothing: a fault of the settings, of the cameras, or somebody's doing."""

from collections import Counter
from collections.abc import Mapping

STEPS = 4  # refused or rolled back, one after the other
ROUNDS = 16  # times `step_images` images without a step that was accepted
NAMED = 3  # cameras that the text names
REMEMBERED = 256  # cameras whose images are counted


class Stall:
    """Counts what came to nothing since the last accepted step. Not thread-safe: the service holds its lock.

    >>> stall = Stall(step_images=16)
    >>> for _ in range(4):
    ...     stall.note("refused", {"gate": 4, "noise": 12})
    >>> stall.text
    'no step was accepted: of the last 4, 4 were refused and 0 rolled back; most of their images came from noise, gate'
    >>> stall.note("accepted", {"gate": 16}); stall.text
    ''
    """

    def __init__(self, step_images: int) -> None:
        self._limit = ROUNDS * step_images
        self.forget()

    def forget(self) -> None:
        self._kinds: Counter[str] = Counter()
        self._cameras: Counter[str] = Counter()
        self._images = 0  # that were answered since anything was decided

    def saw(self, images: int) -> None:
        """Notes images that were answered while the model should adapt."""
        self._images += images

    def note(self, kind: str, cameras: Mapping[str, int]) -> None:
        """Notes what became of a step."""
        if kind in ("accepted", "skipped"):  # skipped: there is nothing to adapt to
            self.forget()
            return
        self._images = 0
        self._kinds[kind] += 1
        for camera, count in cameras.items():
            if camera in self._cameras or len(self._cameras) < REMEMBERED:
                self._cameras[camera] += count

    @property
    def text(self) -> str:
        """Why adapting comes to nothing, in words; empty where it does not."""
        if self._kinds.total() >= STEPS:
            most = ", ".join(name for name, _ in self._cameras.most_common(NAMED))
            refused, back = self._kinds["refused"], self._kinds["rolled_back"]
            return (
                f"no step was accepted: of the last {self._kinds.total()}, {refused} were refused and {back} rolled "
                f"back; most of their images came from {most or 'no camera'}"
            )
        if self._images >= self._limit:
            return (
                f"no step was taken for {self._images} images: too few of them may be adapted to (quarantined, "
                "opted out, flat, repeated, or without a token)"
            )
        return ""
