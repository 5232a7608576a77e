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
    image: Tensor
    number: int  # in the order of arrival
    uses: int = 0
    source: tuple[Tensor, Tensor] | None = None  # features and logits of the source model, once they were needed


@dataclass(eq=False)
class _Camera:
    waiting: list[Item] = field(default_factory=list)
    held: list[Item] = field(default_factory=list)
    seen: int = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.held)


class Buffer:
    """At most `capacity` images of at most `max_cameras` cameras. Not thread-safe: the service holds its lock.

    A camera that has its share already replaces an image of its own, drawn at random, so that what waits is spread over
    the time since the last step rather than being the last burst. One image in four is held back: never adapted to.
    """

    def __init__(self, capacity: int, per_camera: int | None = None, max_cameras: int = 1024, seed: int = 0) -> None:
        self.capacity = capacity
        self.per_camera = per_camera
        self.max_cameras = max_cameras
        self.fresh = 0  # images that came since the last step
        self._cameras: OrderedDict[str, _Camera] = OrderedDict()  # the one that was quiet for longest comes first
        self._size = 0
        self._number = 0
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return self._size

    def sizes(self) -> dict[str, int]:
        return {name: len(camera) for name, camera in self._cameras.items()}

    def add(self, name: str, image: Tensor) -> None:
        """Takes an image in. It is copied: a view would keep its whole batch in memory."""
        camera = self._cameras.get(name)
        if camera is None:
            while len(self._cameras) >= min(self.max_cameras, self.capacity):
                self._size -= len(self._cameras.popitem(last=False)[1])
            camera = self._cameras[name] = _Camera()
        self._cameras.move_to_end(name)
        self._number += 1
        self.fresh += 1
        camera.seen += 1
        part = camera.held if camera.seen % HELD_EVERY == 0 else camera.waiting
        item = Item(name, image.detach().clone(), self._number)
        share = max(1, self.capacity // len(self._cameras))
        limit = share if self.per_camera is None else min(share, self.per_camera)
        limit = max(1, limit // HELD_EVERY if part is camera.held else limit - limit // HELD_EVERY)
        while len(part) > limit:  # more cameras have come since
            part.pop(self._random.randrange(len(part)))
            self._size -= 1
        if len(part) >= limit:
            part[self._random.randrange(len(part))] = item
            return
        if self._size >= self.capacity:
            self._make_room()
        part.append(item)
        self._size += 1

    def take(self, count: int) -> list[Item]:
        """Images for a step: as equal a share of each camera as there are images, fresh ones first."""
        chosen = self._draw(count, lambda camera: camera.waiting, fresh_first=True)
        for item in chosen:
            item.uses += 1
        for camera in self._cameras.values():
            kept = [item for item in camera.waiting if item.uses < REUSE]
            self._size -= len(camera.waiting) - len(kept)
            camera.waiting = kept
        self.fresh = 0
        return chosen

    def held(self, count: int, after: int = 0) -> list[Item]:
        """Images that were never adapted to, of all cameras alike; those that came after the image number `after`."""
        return self._draw(count, lambda camera: [item for item in camera.held if item.number > after])

    @property
    def last_number(self) -> int:
        """Of the image that came last."""
        return self._number

    def drop(self, name: str) -> None:
        """Forgets the images of a camera."""
        camera = self._cameras.pop(name, None)
        if camera is not None:
            self._size -= len(camera)

    def clear(self) -> None:
        self._cameras.clear()
        self._size = 0
        self.fresh = 0

    def _draw(self, count: int, part: Callable[[_Camera], list[Item]], fresh_first: bool = False) -> list[Item]:
        pools = []
        for camera in self._cameras.values():
            items = list(part(camera))
            self._random.shuffle(items)
            if fresh_first:
                items.sort(key=lambda item: item.uses)
            if items:
                pools.append(items)
        self._random.shuffle(pools)  # who gets the images that cannot be divided
        pools.sort(key=len)
        chosen: list[Item] = []
        for place, pool in enumerate(pools):  # the smallest first: what they lack is shared by the rest
            fair = -(-(count - len(chosen)) // (len(pools) - place))
            chosen += pool[:fair]
        return chosen[:count]

    def _make_room(self) -> None:
        largest = max(self._cameras.values(), key=len)
        part = max(largest.waiting, largest.held, key=len)
        part.pop(self._random.randrange(len(part)))
        self._size -= 1
