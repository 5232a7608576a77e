"""A service that adapts through another one: it answers with its leader's snapshots, and sends it images to adapt to.

While the leader is away, the last snapshot goes on answering, and images are not kept for it.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from cafe_tta.adapter import Adapter
from cafe_tta.serve.buffer import Buffer
from cafe_tta.serve.cameras import Camera, Cameras
from cafe_tta.serve.leader import Leader, LeaderAway, LeaderBusy, Outgoing, Standing
from cafe_tta.serve.service import TICK, Service
from cafe_tta.serve.settings import MEBIBYTE, Settings
from cafe_tta.source import SourceStats

POLL = 0.5  # seconds between two questions to the leader
JOIN_SECONDS = 20.0  # that a start waits for the first answer of the leader
REFUSED_SECONDS = 30.0  # after which a snapshot that was refused is fetched again
BATCH_BYTES = 16 * MEBIBYTE  # of images that are sent together


class Outbox(Buffer):
    """Images that wait to be sent, in place of those that wait for a step. The service holds its lock.

    At most `capacity`; then the camera with the most of them loses its oldest. Cameras take turns in what is sent.
    """

    def __init__(self, capacity: int, verified: Callable[[str], bool]) -> None:
        super().__init__(capacity)
        self.open = False  # whether there is a leader to send to
        self.sent = self.unsent = 0  # images
        self.image_bytes = 1  # of one image
        self._verified = verified
        self._outgoing: OrderedDict[str, deque[Outgoing]] = OrderedDict()  # by camera
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def add(self, camera: str, image: Tensor, owner: str | None = None, request: str = "-", label: int = 0) -> None:
        """Keeps an image for the leader."""
        waiting = self._outgoing.setdefault(camera, deque())
        waiting.append(Outgoing(camera, image.detach().float().cpu().clone(), self._verified(camera), request))
        self.image_bytes = 4 * image.numel()
        self._count += 1
        if self._count > self.capacity:
            max(self._outgoing.values(), key=len).popleft()
            self._count -= 1
            self.unsent += 1

    def take_out(self, most: int) -> list[Outgoing]:
        """The next images to send: one of each camera in turn."""
        taken: list[Outgoing] = []
        while self._outgoing and len(taken) < most:
            camera, waiting = self._outgoing.popitem(last=False)
            if waiting:
                taken.append(waiting.popleft())
                self._outgoing[camera] = waiting  # behind the others
        self._count -= len(taken)
        return taken

    def drop(self, camera: str) -> None:
        super().drop(camera)
        self._count -= len(self._outgoing.pop(camera, ()))

    def clear(self) -> None:
        super().clear()
        self._outgoing.clear()
        self._count = 0

    def shut(self) -> None:
        """Keeps no more images: there is no leader to send them to."""
        self.open = False
        self.unsent += self._count
        self.clear()


class FollowedCameras(Cameras):
    """Cameras of which the leader says which model answers them, and which are quarantined."""

    def __init__(self, *given: Any) -> None:
        self._source: frozenset[str] = frozenset()
        self._why: dict[str, str] = {}
        super().__init__(*given)

    def follow(self, standing: Standing) -> None:
        """Takes up what the leader says. Callers hold the service's lock."""
        self._source, self._why = frozenset(standing.source), dict(standing.quarantined)
        for camera in self:
            self._apply(camera)

    def get(self, name: str) -> Camera | None:
        known = super().get(name)
        return self.touch(name) if known is None and name in self._source else known

    def touch(self, name: str) -> Camera:
        camera = super().touch(name)
        self._apply(camera)
        return camera

    def assess(self) -> list[Camera]:
        super().assess()
        with self._lock:
            for camera in self:
                self._apply(camera)
        return []

    def _apply(self, camera: Camera) -> None:
        if camera.source_features.maxlen != 0:
            camera.source_features = deque(maxlen=0)  # without them, nothing is decided here
        camera.looks_like_source, camera.gain = camera.name in self._source, None
        camera.quarantined = self._why.get(camera.name, "")


class Follower(Service):
    """Answers as its leader does, and lets it adapt. Any thread may call any method."""

    def __init__(self, adapter: Adapter, settings: Settings, source_stats: SourceStats | None, leader: Leader) -> None:
        # The leader looks at the images and judges the steps.
        super().__init__(adapter, replace(settings, judge=False, gate=False), source_stats)
        self._leader = leader
        self._outbox = Outbox(settings.buffer_images, self._is_verified)
        self._followed = FollowedCameras(
            self.settings, adapter.classifier.num_features, self._reference, self._outbox, self._lock
        )
        self._buffer, self._cameras = self._outbox, self._followed
        self._standing: Standing | None = None  # of the leader, as it said last
        self._taken = ("", -1)  # run and version of the leader that answers here
        self._away: str | None = None  # why there is no leader; empty while there is one, None before it was asked
        self._since = time.time()  # it is there, or away
        self._refused: tuple[tuple[str, int], str, float] | None = None  # a snapshot, why, and until when
        self._send_after = 0.0  # on the clock of time.monotonic
        self._asked = threading.Event()

    def start(self) -> None:
        """Takes up the leader's snapshot, if it answers, and starts the thread that follows it."""
        super().start()
        self._asked.wait(JOIN_SECONDS)

    def status(self) -> dict[str, Any]:
        status = super().status()
        with self._lock:
            if status["state"] == "adapting":
                status["state"] = "following" if self._away == "" else "alone"
            status["leader"] = {
                "url": self._leader.url,
                "away": (self._away or None) if self._away is not None else "it was not asked yet",
                "since": self._since,
                "sent_images": self._outbox.sent,
                "unsent_images": self._outbox.unsent,
            }
        return status

    def reset(self) -> None:
        self._refuse("reset")

    def rollback(self, version: int | None = None) -> None:
        self._refuse("roll back")

    def camera_opt_out(self, camera: str, out: bool = True) -> None:
        self._refuse("opt a camera out or in")

    def undo(self, camera: str) -> None:
        self._refuse("undo what was learnt from a camera")

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        self._leader.close()

    def _refuse(self, what: str) -> None:
        raise ValueError(f"cannot {what}: this server follows {self._leader.url}; ask its leader")

    # What the service asks of itself

    def _is_verified(self, name: str) -> bool:
        camera = self._followed.get(name)
        return camera is not None and camera.verified

    def _wanted(self, camera: Camera, trusted: bool) -> bool:
        """Whether an image is sent; those of quarantined cameras are too: the leader sees when that is over."""
        if not self._adapting or camera.name in self._opted_out or (self._only_verified and not trusted):
            return False
        self._outbox.unsent += self._standing is None
        return self._outbox.open

    def _images_to_step(self) -> int | None:
        return None

    def _waiting(self) -> str:
        return ""

    def _enough(self) -> bool:
        return self._outbox.count >= min(self._most(), self._outbox.capacity // 2) and self._may_send()

    def _most(self) -> int:
        """Images that are sent together."""
        room = min(BATCH_BYTES, self.settings.max_body_bytes // 2)
        return max(1, min(self.settings.max_batch_size, room // self._outbox.image_bytes))

    def _may_send(self) -> bool:
        adapting = self._standing is not None and self._standing.adapting
        return adapting and self._adapting and time.monotonic() >= self._send_after

    # The thread that follows the leader

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK
        while True:
            try:
                self._follow()
                self._asked.set()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    self._tick()
            except Exception as error:  # whatever goes wrong here, clients are answered
                self._recover(error)
            with self._lock:
                self._wake.wait_for(lambda: self._closing or self._enough(), POLL)
                if self._closing:
                    return

    def _tick(self) -> None:
        self._followed.look()
        with self._lock:
            self._series.point(self._followed.drift["overall"], None)
        self._save_if_due()

    def _follow(self) -> None:
        """Sends images, or asks how the leader is; then takes up its snapshot, if that is another."""
        with self._lock:
            images = self._outbox.take_out(self._most()) if self._may_send() else []
        try:
            standing = self._leader.send(images, self._version) if images else self._leader.standing(self._version)
            sent = len(images)
            if (standing.run, standing.version) != self._taken:
                self._take_up((standing.run, standing.version))
        except LeaderBusy as error:
            with self._lock:
                self._outbox.unsent += len(images)
                self._send_after = time.monotonic() + error.seconds
            return
        except (LeaderAway, ValueError) as error:
            with self._lock:
                self._outbox.unsent += len(images)
            self._lose(str(error))
            return
        except Exception as error:  # whatever the leader sent
            self._lose(f"{type(error).__name__}: {error}")
            raise
        self._join(standing, sent)

    def _take_up(self, wanted: tuple[str, int]) -> None:
        """Lets the leader's snapshot answer; raises ValueError where it is damaged, of another model, or absurd."""
        if self._refused is not None and self._refused[0] == wanted and time.monotonic() < self._refused[2]:
            raise ValueError(self._refused[1])  # it need not be fetched again and again
        content = self._leader.snapshot(4 * self._snapshots.num_bytes() + 64 * MEBIBYTE)
        try:
            with self._stepping:
                self._taken = self._snapshots.follow(content, self._taken[0])
        except ValueError as error:
            text = f"its version {wanted[1]} was refused: {error}"
            self._refused = (wanted, text, time.monotonic() + REFUSED_SECONDS)
            raise ValueError(text) from None
        with self._lock:
            self._cameras.forget_clusters()
            self._record("followed", f"version {self._version} of the leader answers")

    def _join(self, standing: Standing, sent: int) -> None:
        with self._lock:
            self._outbox.sent += sent
            self._standing = standing
            for camera in set(standing.opted_out) - self._opted_out:
                self._outbox.drop(camera)
            self._opted_out = set(standing.opted_out)
            self._followed.follow(standing)
            if self._away != "":
                self._away, self._since = "", time.time()
                self._record("joined", f"follows {self._leader.url}")
            self._outbox.open = standing.adapting
            if not standing.adapting:
                self._outbox.shut()

    def _lose(self, why: str) -> None:
        """Notes that there is no leader now; what answers goes on doing so."""
        with self._lock:
            if not self._away:
                self._since = time.time()
                text = f"the leader at {self._leader.url} is away: {why}; version {self._version} goes on answering"
                self._record("leader_lost", text)
            self._away, self._standing = why, None
            self._outbox.shut()
