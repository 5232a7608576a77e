"""A simulation: its options, its preparation, and the records of its requests."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from cafe_tta import data
from cafe_tta.models import Model, ModelOptions, load_classifier
from cafe_tta.options import Options, did_you_mean, option
from cafe_tta.simulate import images
from cafe_tta.simulate.client import LOST_AFTER, Away, Client
from cafe_tta.simulate.play import Plan, Record, play
from cafe_tta.simulate.rounds import play_rounds
from cafe_tta.simulate.scenarios import EACH, ROUNDS, SCENARIOS, HonestCamera, domains, honest_cameras
from cafe_tta.simulate.scores import Scores
from cafe_tta.simulate.summary import Summary
from cafe_tta.simulate.weather import Camera, make_cameras

HOPELESS = 20  # requests lost before any was answered
DURATION = 120.0  # seconds
QUIET = 5.0  # seconds without an answer that are remarked on, where answers should come every half second
_SERVER, _SCENARIO, _CAMERAS, _IMAGES = "The server", "Scenarios", "The cameras", "The images"
_MODEL = "The source model, to compare with"


@dataclass(frozen=True)
class SimulationOptions(Options):
    """Options of a simulation.

    >>> SimulationOptions(duration=5, images=5)
    Traceback (most recent call last):
    ValueError: expected `duration` or `images`, but got both
    """

    url: str = option("http://127.0.0.1:8080", "Address of the server.", panel=_SERVER)
    token: str | None = option(
        None, "Bearer token, if a proxy asks for one.", panel=_SERVER, secret=True, envvar="CAFE_TTA_TOKEN"
    )
    name: str | None = option(
        None, "Name of the model on the server, where it serves several.", panel=_SERVER, metavar="NAME"
    )
    wait: float = option(60.0, "Seconds to wait until the server is ready.", panel=_SERVER, least=0)

    scenario: str | None = option(
        None,
        "Play a scenario instead: six honest cameras, in steady weather, and in most of them somebody who means harm. "
        "--list explains them.",
        panel=_SCENARIO,
        metavar="NAME",
    )
    rounds: int = option(
        ROUNDS, f"Length of a scenario: each honest camera sends {EACH} images a round.", panel=_SCENARIO, least=1
    )

    cameras: int = option(
        6, "Number of cameras; each has weather, light or a link of its own.", panel=_CAMERAS, least=1
    )
    rate: float = option(
        20.0,
        "Mean number of images a second of a camera; its own lies between half and 1.5 times that.",
        panel=_CAMERAS,
        above=0,
    )
    duration: float | None = option(
        None, f"Length of the simulation in seconds. {DURATION:.0f} if not given.", panel=_CAMERAS, above=0
    )
    images: int | None = option(
        None, "Number of images to send in all, instead of a duration.", panel=_CAMERAS, least=1
    )
    images_per_request: int = option(4, "Number of images that a camera sends at once.", panel=_CAMERAS, least=1)
    period: float | None = option(
        None, "Seconds from one fog to the next. A third of the simulation if not given.", panel=_CAMERAS, above=0
    )
    fast: bool = option(False, "Let every camera send as soon as it is answered.", panel=_CAMERAS)
    processes: int = option(2, "Number of processes that the cameras are spread over.", panel=_CAMERAS, least=1)
    seed: int = option(0, "Seed; the same one sends the same images.", panel=_CAMERAS, least=0)

    data: str | None = option(None, "Labelled images: digits:test, a folder with class folders, ….", panel=_IMAGES)
    pool: int = option(
        1024, "Number of images to draw from them, which are sent again and again.", panel=_IMAGES, least=1
    )
    corruption_preset: str = option(
        "cifar", "Parameters of the corruptions: cifar for small images, imagenet for large ones.", panel=_IMAGES
    )

    model: str | None = option(
        None, "Model that the server serves, as for `serve`. The embedded digits if not given.", panel=_MODEL
    )
    weights: Path | None = option(None, "File of weights for the model.", panel=_MODEL)

    blocks: int = option(10, "Number of rows of the table over time.", panel="The tables", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.duration is not None and self.images is not None:
            raise ValueError("expected `duration` or `images`, but got both")
        if self.scenario is not None:
            self._check_scenario(self.scenario)
        if self.weights is not None and self.model is None:
            raise ValueError("expected `model`, the name of an architecture, with `weights`")

    def _check_scenario(self, name: str) -> None:
        if name not in SCENARIOS:
            raise ValueError(
                f"no scenario {name!r}{did_you_mean(name, SCENARIOS)}; cafe-tta simulate --list explains them all"
            )
        for other in ("duration", "images", "period"):
            if getattr(self, other) is not None:
                raise ValueError(f"expected `rounds` with `scenario`, but got `{other}`")


class Simulation:
    """Cameras that send images to a server, ready to be prepared and then played."""

    def __init__(self, options: SimulationOptions, say: Callable[[str], None] = lambda _: None) -> None:
        """Waits for the server, loads the source model, and checks that both know the same classes."""
        self.options, self._say = options, say
        self.scenario = None if options.scenario is None else SCENARIOS[options.scenario]
        self.cameras: Sequence[Camera | HonestCamera] = (
            make_cameras(options.cameras, options.rate, options.seed)
            if self.scenario is None
            else honest_cameras(rate=options.rate)
        )
        self.rate = sum(camera.rate for camera in self.cameras)  # of all cameras together
        self.duration = options.duration or (options.images / self.rate if options.images else DURATION)
        if self.scenario is not None:
            self.duration = options.rounds * EACH / options.rate
        self.scores = None if self.scenario is None else Scores(options.rounds, len(self.cameras))
        self.steps: Counter[str] = Counter()  # that the server took meanwhile, by what became of them
        self.summary = Summary(self.cameras, self.duration, options.blocks)
        self.seconds = 0.0  # that it took
        with closing(Client(options.url, options.token)) as client:
            client.until_ready(options.wait, say)
            self.url, self._served = client.url, _served_name(client, options.name)
            self._model = _source_model(options, say)
            _check_classes(client, self._served, self._model)
        self.imageset, self._labels = _labelled(options, self._model)
        own = {domain for camera in self.cameras if isinstance(camera, Camera) for domain in camera.weather.domains()}
        self._domains = sorted(own) if self.scenario is None else domains()
        self.num_images = 0  # in each domain, once they are prepared

    @property
    def images_to_prepare(self) -> int:
        return min(self.options.pool, len(self.imageset)) * len(self._domains)

    def prepare(self, folder: Path, advance: Callable[[int], None] = lambda _: None) -> None:
        """Makes the images of every domain in a folder."""
        made = images.make(
            folder,
            self.imageset,
            self._labels,
            self._classify,
            self._domains,
            preset=self.options.corruption_preset,
            seed=self.options.seed,
            most=self.options.pool,
            advance=advance,
        )
        self.num_images = len(made)

    def play(self, folder: Path, stopped: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Sends the prepared images, and yields a record of every request as it is answered."""
        options = self.options
        plan = Plan(
            options.url,
            self._served,
            options.token,
            folder,
            self.duration,
            self.period,
            options.images_per_request,
            keeps_time=not options.fast,
        )
        start = time.monotonic()
        silence = Silence(self._say, max(QUIET, 10 * options.images_per_request / self.rate))

        def begun() -> None:
            nonlocal start
            start = time.monotonic()
            silence.broken()

        def ended() -> bool:
            silence.look()
            return stopped() or self._hopeless()

        records = self._records(plan, ended, begun)
        for record in records:
            if not record.lost:
                silence.broken()
            self.summary.add(record)
            yield record
        self.seconds = time.monotonic() - start

    def _records(self, plan: Plan, ended: Callable[[], bool], begun: Callable[[], None]) -> Iterator[Record]:
        if self.scenario is None or self.scores is None:
            cameras = [camera for camera in self.cameras if isinstance(camera, Camera)]
            yield from play(plan, cameras, self.options.processes, ended, begun)
            return
        before = self._server_steps()
        begun()
        for number, record in play_rounds(plan, self.scenario, self.options.rounds, self.options.seed, ended):
            if not record.lost:
                self.scores.add(number, record.camera, record.images, record.source, record.served)
            yield record
        self.steps = self._server_steps() - before

    def _server_steps(self) -> Counter[str]:
        with closing(Client(self.options.url, self.options.token)) as client:
            try:
                return Counter(client.get(f"/api/status?model={quote(self._served)}")["steps"])
            except Away:  # it went down; what was answered before counts all the same
                return Counter()

    @property
    def period(self) -> float:
        return self.options.period or self.duration / 3

    def results(self) -> dict[str, Any]:
        """All numbers, and what decided the images that were sent, as plain JSON."""
        options = self.options
        settings = {
            "cameras": [camera.describe() for camera in self.cameras],
            "url": options.url,
            "seed": options.seed,
            "duration": self.duration,
            "period": self.period,
            "images_per_request": options.images_per_request,
            "data": self.imageset.name,
            "pool": self.num_images,
            "model": options.model or "embedded digits",
            "processes": options.processes,
            "fast": options.fast,
        }
        found = {"settings": settings, **self.summary.numbers(self.seconds)}
        if self.scores is not None:
            settings |= {"scenario": options.scenario, "rounds": options.rounds}
            found["scenario"] = {**self.scores.numbers(), "steps": dict(self.steps)}
        return found

    def _classify(self, pixels: Any) -> torch.Tensor:
        with torch.no_grad():
            return self._model.classifier(self._model.preprocessing(pixels))

    def _hopeless(self) -> bool:
        """Whether the server has answered nothing at all: there is no sense in going on for minutes."""
        return not self.summary.overall.images and sum(self.summary.lost.values()) >= HOPELESS


class Silence:
    """Tells, once for each time, that no answer has come for so many seconds."""

    def __init__(self, say: Callable[[str], None], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._seconds, self._clock = say, seconds, clock
        self._last: float | None = None  # answer; none is expected before the beginning, or after it was told

    def broken(self) -> None:
        """An answer has come, or the simulation has begun."""
        self._last = self._clock()

    def look(self) -> None:
        """Tells it, where it is time."""
        if self._last is not None and self._clock() - self._last > self._seconds:
            self._last = None
            again = f"Requests are sent again, each for {LOST_AFTER:.0f} s"
            self._say(f"note: no answer for {self._seconds:.0f} s; is the server still there? {again}")


def _served_name(client: Client, wanted: str | None) -> str:
    """The name of the model on the server: the only one, or the one that is wanted."""
    index = client.get("/v2/repository/index")
    if not isinstance(index, list) or not all(isinstance(model, dict) and "name" in model for model in index):
        raise RuntimeError(f"{client.url}/v2/repository/index names no model; is this a server of cafe-tta?")
    names = [str(model["name"]) for model in index]
    if wanted not in names and (wanted is not None or len(names) != 1):
        known = ", ".join(names)
        raise ValueError(f"expected `name` to be one of the models that the server has ({known}), but got {wanted}")
    return wanted or names[0]


def _source_model(options: SimulationOptions, say: Callable[[str], None]) -> Model:
    if options.model is not None:
        return load_classifier(ModelOptions(options.model, weights=options.weights, device="cpu"))
    from cafe_tta.bench.embedded import embedded_digits  # loads scikit-learn and more: only when it is needed

    return embedded_digits(say=say).model


def _check_classes(client: Client, name: str, source: Model) -> None:
    outputs = {output["name"]: output["shape"] for output in client.get(f"/v2/models/{name}").get("outputs", [])}
    theirs, ours = outputs.get("logits", [None])[-1], source.classifier.num_classes
    if theirs is not None and theirs != ours:
        raise ValueError(
            f"expected the server's `model` and `weights`, but its model {name!r} has {theirs} classes, and the source "
            f"model to compare with has {ours}"
        )


def _labelled(options: SimulationOptions, source: Model) -> tuple[data.ImageSet, Any]:
    spec = options.data or ("digits:test" if options.model is None else "")
    if not spec:
        raise ValueError("expected `data`, labelled images for the model: a folder with class folders, cifar10:test, …")
    imageset = data.load(spec)
    labels, reason = data.match_labels(imageset, source.classes, source.classifier.num_classes)
    if labels is None:
        raise ValueError(f"accuracy cannot be computed on {imageset.name}: {reason}")
    return imageset, labels
