"""One domain of a corrupted set as an image set of its own, and what corrupted sets refuse."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256

from cafe_tta.corruptions import NAMES
from cafe_tta.data.imageset import CorruptedSet, Images, ImageSet, Labels


@dataclass(frozen=True, eq=False)
class DomainSet:
    """The images of a corrupted set with one corruption at one severity."""

    name: str
    origin: CorruptedSet
    corruption: str
    severity: int

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.origin.classes

    @property
    def labels(self) -> Labels | None:
        return self.origin.labels

    def __len__(self) -> int:
        return len(self.origin)

    def item_name(self, index: int) -> str:
        return self.origin.item_name(index)

    def images(self, indices: Sequence[int]) -> Images:
        return self.origin.corrupted(indices, self.corruption, self.severity)

    def digest(self) -> str:
        return sha256(f"{self.origin.digest()} {self.corruption} {self.severity}".encode()).hexdigest()


def domain_or_all(found: CorruptedSet, kind: str, domain: str, source: str) -> ImageSet:
    """The whole corrupted set, or the domain of it that has a name such as `fog-5`."""
    if not domain:
        return found
    corruption, dash, severity = domain.rpartition("-")
    if not dash or not severity.isdecimal():
        raise ValueError(f"expected a corruption and a severity, such as {kind}:fog-5@DIR, but got {domain!r}")
    check_domain(found, corruption, int(severity), source)
    return DomainSet(found.name.replace(kind, f"{kind}:{domain}", 1), found, corruption, int(severity))


def check_domain(found: CorruptedSet, corruption: str, severity: int, source: str) -> None:
    """Refuses a corruption or a severity that is not there, and says what is."""
    there = found.corruptions()
    if corruption not in there:
        near = get_close_matches(corruption, there, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        missing = [name for name in NAMES if name not in there]
        lacking = f"; missing of the {len(NAMES)}: {', '.join(missing)}, from {source}" if missing else ""
        raise ValueError(f"{found.name} has no corruption {corruption!r}{hint}; it has {', '.join(there)}{lacking}")
    if severity not in found.severities():
        have = ", ".join(map(str, found.severities()))
        raise ValueError(f"{found.name} has no severity {severity!r}; it has {have}")


def refuse_clean(found: CorruptedSet) -> ValueError:
    kind, _, place = found.name.partition("@")
    example = f"{kind}:{found.corruptions()[0]}-{found.severities()[-1]}@{place}"
    return ValueError(f"{found.name} holds no clean images; for those of one corruption and severity, say {example}")
