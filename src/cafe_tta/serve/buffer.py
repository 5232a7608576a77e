"""Images that wait for an adaptation step, balanced over cameras and classes: none can crowd out the others."""

import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from cafe_tta.judge import PANEL

VALIDATION_EVERY = 4  # every fourth image of a camera is a validation image: snapshots are judged on it
NEWCOMERS = ""  # the owner of the share that new and unknown cameras have in common: no camera has this name
FEW = 4  # a step on this part of its images is better than none, where most cameras are silent
REUSE = 4  # steps that an image takes part in at most: the model must not overfit the few images of quiet cameras


@dataclass(eq=False)
class Item:
    """An image of a camera, and what is known of it."""

    camera: str
    owner: str  # whose share of the buffer it takes: the camera's own, or the one that new cameras have in common
    image: Tensor
    number: int  # in the order of arrival
    request: str = "-"  # id of the request that brought it
    label: int = 0  # the predicted class
    uses: int = 0
    source: tuple[Tensor, Tensor] | None = None  # the source model's features and logits, once they were needed


class _Pool:
    """Items by predicted class: which class has most of them is known without looking at each."""

    def __init__(self) -> None:
        self._by_label: dict[int, list[Item]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._by_label.values())

    def add(self, item: Item) -> None:
        self._by_label.setdefault(item.label, []).append(item)
        self._size += 1

    def remove_superfluous(self, rng: random.Random) -> None:
        """Removes one of the class that has most of them, at random."""
        items = max(self._by_label.values(), key=len)
        i = rng.randrange(len(items))
        items[i] = items[-1]
        items.pop()
        self._size -= 1

    def keep(self, wanted: Callable[[Item], bool]) -> int:
        """Removes the items that are not wanted, and returns how many they were."""
        before = self._size
        kept = {label: [item for item in items if wanted(item)] for label, items in self._by_label.items()}
        self._by_label = {label: items for label, items in kept.items() if items}
        self._size = sum(map(len, kept.values()))
        return before - self._size


@dataclass(eq=False)
class _Share:
    waiting: _Pool = field(default_factory=_Pool)
    validation: _Pool = field(default_factory=_Pool)
    seen: int = 0
    arrived: int = 0  # images since the last step, without validation images

    def unused(self) -> int:
        return sum(item.uses == 0 for item in self.waiting)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.validation)


class Buffer:
    """At most `capacity` images in at most `max_shares` shares. Not thread-safe: the service holds its lock.

    A camera whose share is full replaces an image of its own, drawn at random from the class that it has most of, so
    that the waiting images are spread over classes and time rather than being the last burst: a camera that sees one
    class for hours keeps images of those that it saw before. One image in four is a validation image, which the model
    is never adapted to.

    The share of the newcomers counts no more than that of one camera: in a step, among the validation images, and for
    when the next step is due. Cameras that are nearly silent do not keep it waiting for ever.
    """

    def __init__(self, capacity: int, per_camera: int | None = None, max_shares: int = 1024, seed: int = 0) -> None:
        self.capacity = capacity
        self.per_camera = per_camera
        self.max_shares = max_shares
        self._shares: OrderedDict[str, _Share] = OrderedDict()  # the one that was quiet for longest comes first
        self._size = 0
        self._number = 0
        self._forget_arrivals()
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return self._size

    @property
    def arrived(self) -> int:
        """Images since the last step, without validation images; those of newcomers as if they were one camera."""
        together = self._own_arrived + min(self._shared_arrived, self._most_arrived)
        # Beside silent cameras, newcomers bring about steps as rarely as one camera of many would.
        return max(together, self._shared_arrived // self.num_voices)

    @property
    def num_voices(self) -> int:
        """Cameras with a share of their own, and all newcomers as one more."""
        return len(self._shares) - (NEWCOMERS in self._shares) + 1

    def _forget_arrivals(self) -> None:
        for share in self._shares.values():
            share.arrived = 0
        self._own_arrived = self._shared_arrived = 0
        self._most_arrived = 0  # of any share but that of the newcomers

    def sizes(self) -> dict[str, int]:
        return {owner: len(share) for owner, share in self._shares.items()}

    def add(self, camera: str, image: Tensor, owner: str | None = None, request: str = "-", label: int = 0) -> None:
        """Adds a copy of an image: a view would keep its whole batch in memory."""
        owner = camera if owner is None else owner
        share = self._shares.get(owner)
        if share is None:
            while len(self._shares) >= min(self.max_shares, self.capacity):
                self._size -= len(self._shares.popitem(last=False)[1])
            share = self._shares[owner] = _Share()
        self._shares.move_to_end(owner)
        self._number += 1
        share.seen += 1
        validates = share.seen % VALIDATION_EVERY == 0
        self._note_arrival(owner, share, validates)
        part = share.validation if validates else share.waiting
        item = Item(camera, owner, image.detach().clone(), self._number, request, label)
        limit = self._limit(validates)
        while len(part) >= limit:  # more than one where cameras have come since
            part.remove_superfluous(self._random)
            self._size -= 1
        if self._size >= self.capacity:
            self._make_room()
        part.add(item)
        self._size += 1

    def _note_arrival(self, owner: str, share: _Share, validates: bool) -> None:
        share.arrived += not validates
        if owner == NEWCOMERS:
            self._shared_arrived += not validates
        else:
            self._own_arrived += not validates
            self._most_arrived = max(self._most_arrived, share.arrived)

    def take(self, count: int) -> list[Item]:
        """Draws images for a step, in any order: as equal a share of each camera, and of its classes, as there are.

        Of a class, unused images come first.
        """
        chosen = self._draw(count, lambda share: share.waiting)
        self._random.shuffle(chosen)  # methods may look at what comes one after the other
        for item in chosen:
            item.uses += 1
        for share in self._shares.values():
            self._size -= share.waiting.keep(lambda item: item.uses < REUSE)
        self._forget_arrivals()
        return chosen

    def ready(self, count: int) -> bool:
        """Whether `count` unused images wait; where most cameras are silent, a quarter of them is enough."""
        return self._unused_missing(count) <= 0

    def missing(self, count: int, rounds: int = 1) -> int:
        """Images, without validation images, that are wanted until a step is due: `rounds` times `count`, and `ready`.

        Images of cameras with a share of their own; of newcomers it may take more.
        """
        return max(0, rounds * count - self.arrived, self._unused_missing(count))

    def _unused_missing(self, count: int) -> int:
        own = [share.unused() for owner, share in self._shares.items() if owner != NEWCOMERS]
        shared = self._shares[NEWCOMERS].unused() if NEWCOMERS in self._shares else 0
        unused = sum(own) + _most_of_newcomers(count, own, shared)
        lacking, few = count - unused, max(2 * count - self.arrived, count // FEW - unused)
        # Where there is no room for as many, new images take the places of unused ones too.
        shares = list(self._shares.values()) or [_Share()]
        sending = [share for share in shares if share.arrived] or shares
        room = sum(max(0, self._limit(validates=False) - len(share.waiting)) for share in sending)
        return few if lacking > room else min(lacking, few)

    def validation(self, count: int) -> list[Item]:
        """Draws validation images, the same number from each camera as far as they have them."""
        return self._draw(count, lambda share: share.validation)

    def num_validation(self) -> int:
        return sum(len(share.validation) for share in self._shares.values())

    def drop(self, camera: str) -> None:
        """Removes the images of a camera."""
        for owner, share in list(self._shares.items()):
            for pool in (share.waiting, share.validation):
                self._size -= pool.keep(lambda item: item.camera != camera)
            if not len(share):
                del self._shares[owner]

    def drop_share(self, owner: str) -> None:
        """Removes the images of a share."""
        self._size -= len(self._shares.pop(owner, ()))

    def clear(self) -> None:
        self._shares.clear()
        self._size = 0
        self._forget_arrivals()

    def _limit(self, validates: bool) -> int:
        """How many images of one camera may wait, or validate, with the present number of cameras."""
        equal = max(1, self.capacity // max(1, len(self._shares)))
        limit = equal if self.per_camera is None else min(equal, self.per_camera)
        return max(1, limit // VALIDATION_EVERY if validates else limit - limit // VALIDATION_EVERY)

    def _draw(self, count: int, part: Callable[[_Share], _Pool]) -> list[Item]:
        by_owner = {owner: self._by_class(part(share)) for owner, share in self._shares.items() if part(share)}
        if NEWCOMERS in by_owner:
            own = [len(items) for owner, items in by_owner.items() if owner != NEWCOMERS]
            del by_owner[NEWCOMERS][_most_of_newcomers(count, own, len(by_owner[NEWCOMERS])) :]
        pools = list(by_owner.values())
        self._random.shuffle(pools)  # decides who gets the images that cannot be divided
        pools.sort(key=len)
        chosen: list[Item] = []
        for i, pool in enumerate(pools):  # the smallest first: the others share what it cannot give
            fair = -(-(count - len(chosen)) // (len(pools) - i))
            chosen += pool[:fair]
        return chosen[:count]

    def _by_class(self, pool: _Pool) -> list[Item]:
        """The items in turns of one of each class, those that were used least first, otherwise in any order."""
        mixed = sorted(self._random.sample(list(pool), len(pool)), key=lambda item: item.uses)
        seen: Counter[int] = Counter()
        turns = []
        for item in mixed:
            turns.append(seen[item.label])
            seen[item.label] += 1
        return [mixed[i] for i in sorted(range(len(mixed)), key=turns.__getitem__)]

    def _make_room(self) -> None:
        largest = max(self._shares.values(), key=len)
        max(largest.waiting, largest.validation, key=len).remove_superfluous(self._random)
        self._size -= 1


def _most_of_newcomers(count: int, own: Sequence[int], shared: int) -> int:
    """How many of the `shared` images of newcomers may be among `count`, beside those of other cameras.

    As many as the camera with the most of them has, or what is missing for a quarter; all where there are no others.
    """
    return min(shared, max(*own, count // FEW - sum(own))) if any(own) else shared


def panels(items: Sequence[Item]) -> list[list[int]]:
    """Indices of the items, dealt by camera into panels of at least `PANEL`; small cameras share one."""
    by_owner: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        by_owner.setdefault(item.owner, []).append(i)
    # Large ones have panels of their own; the small are put together in an order that no client chooses easily.
    dealt = [members for members in by_owner.values() if len(members) >= PANEL]
    small = sorted((name for name in by_owner if len(by_owner[name]) < PANEL), key=lambda n: zlib.crc32(n.encode()))
    pending: list[int] = []
    for name in small:
        pending += by_owner[name]
        if len(pending) >= PANEL:
            dealt.append(pending)
            pending = []
    if pending and dealt and len(pending) < PANEL // 2:
        dealt[-1] = dealt[-1] + pending
    elif pending:
        dealt.append(pending)
    return dealt
