"""Images that wait for an adaptation step, balanced over cameras: none can crowd out the others."""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

HELD_EVERY = 4  # one image of so many is held back, to judge snapshots on
REUSE = 4  # steps that an image takes part in at most: quiet cameras must not be adapted to the same few for ever


@dataclass(eq=False)
class Item:
    """An image of a camera, and what is known of it."""

    camera: str
    place: str  # whose share of the buffer it takes: the camera's own, or one that newcomers have together
    image: Tensor
    number: int  # in the order of arrival
    uses: int = 0
    source: tuple[Tensor, Tensor] | None = None  # features and logits of the source model, once they were needed


@dataclass(eq=False)
class _Place:
    waiting: list[Item] = field(default_factory=list)
    held: list[Item] = field(default_factory=list)
    seen: int = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.held)


class Buffer:
    """At most `capacity` images in at most `max_places` shares. Not thread-safe: the service holds its lock.

    A camera that has its share already replaces an image of its own, drawn at random, so that what waits is spread over
    the time since the last step rather than being the last burst. One image in four is held back: never adapted to.
    """

    def __init__(self, capacity: int, per_camera: int | None = None, max_places: int = 1024, seed: int = 0) -> None:
        self.capacity = capacity
        self.per_camera = per_camera
        self.max_places = max_places
        self.arrived = 0  # images since the last step that were not held back
        self._places: OrderedDict[str, _Place] = OrderedDict()  # the one that was quiet for longest comes first
        self._size = 0
        self._number = 0
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return self._size

    def sizes(self) -> dict[str, int]:
        return {name: len(place) for name, place in self._places.items()}

    def add(self, camera: str, image: Tensor, place: str | None = None) -> None:
        """Takes an image in. It is copied: a view would keep its whole batch in memory."""
        name = camera if place is None else place
        home = self._places.get(name)
        if home is None:
            while len(self._places) >= min(self.max_places, self.capacity):
                self._size -= len(self._places.popitem(last=False)[1])
            home = self._places[name] = _Place()
        self._places.move_to_end(name)
        self._number += 1
        home.seen += 1
        holds_back = home.seen % HELD_EVERY == 0
        self.arrived += not holds_back
        part = home.held if holds_back else home.waiting
        item = Item(camera, name, image.detach().clone(), self._number)
        limit = self._limit(holds_back)
        while len(part) > limit:  # more cameras have come since
            part.pop(self._random.randrange(len(part)))
            self._size -= 1
        if len(part) == limit:
            part[self._random.randrange(len(part))] = item
            return
        if self._size >= self.capacity:
            self._make_room()
        part.append(item)
        self._size += 1

    def take(self, count: int) -> list[Item]:
        """Images for a step: as equal a share of each camera as there are images, fresh ones first."""
        chosen = self._draw(count, lambda place: place.waiting, fresh_first=True)
        for item in chosen:
            item.uses += 1
        for place in self._places.values():
            kept = [item for item in place.waiting if item.uses < REUSE]
            self._size -= len(place.waiting) - len(kept)
            place.waiting = kept
        self.arrived = 0
        return chosen

    def ready(self, count: int) -> bool:
        """Whether so many wait that no step has used; when most cameras are silent, a quarter of them is enough."""
        unused = self._unused()
        return unused >= count or (self.arrived >= 2 * count and unused >= count // 4)

    def held(self, count: int) -> list[Item]:
        """Images that are never adapted to, of all cameras alike."""
        return self._draw(count, lambda place: place.held)

    def num_held(self) -> int:
        return sum(len(place.held) for place in self._places.values())

    def drop(self, camera: str) -> None:
        """Forgets the images of a camera."""
        for name, place in list(self._places.items()):
            before = len(place)
            place.waiting = [item for item in place.waiting if item.camera != camera]
            place.held = [item for item in place.held if item.camera != camera]
            self._size -= before - len(place)
            if not len(place):
                del self._places[name]

    def clear(self) -> None:
        self._places.clear()
        self._size = 0
        self.arrived = 0

    def _limit(self, holds_back: bool) -> int:
        """Images of one camera that may wait, or be held back, now that there are so many cameras."""
        share = max(1, self.capacity // max(1, len(self._places)))
        limit = share if self.per_camera is None else min(share, self.per_camera)
        return max(1, limit // HELD_EVERY if holds_back else limit - limit // HELD_EVERY)

    def _unused(self) -> int:
        return sum(item.uses == 0 for place in self._places.values() for item in place.waiting)

    def _draw(self, count: int, part: Callable[[_Place], list[Item]], fresh_first: bool = False) -> list[Item]:
        pools = []
        for place in self._places.values():
            items = list(part(place))
            self._random.shuffle(items)
            if fresh_first:
                items.sort(key=lambda item: item.uses)
            if items:
                pools.append(items)
        self._random.shuffle(pools)  # who gets the images that cannot be divided
        pools.sort(key=len)
        chosen: list[Item] = []
        for i, pool in enumerate(pools):  # the smallest first: what they lack is shared by the rest
            fair = -(-(count - len(chosen)) // (len(pools) - i))
            chosen += pool[:fair]
        return chosen[:count]

    def _make_room(self) -> None:
        largest = max(self._places.values(), key=len)
        part = max(largest.waiting, largest.held, key=len)
        part.pop(self._random.randrange(len(part)))
        self._size -= 1
