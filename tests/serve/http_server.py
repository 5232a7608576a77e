"""A real server process for the tests, and a small model for it to serve."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import cafe_tta as cafe
from cafe_tta import models
from cafe_tta.data.digits import CLASSES, load_digits

PREPROCESSING = models.Preprocessing(size=32, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))
PATIENCE = 240.0  # seconds: on a machine that has other things to do


@dataclass(frozen=True)
class Files:
    """A model of digits that nobody trained: every image has its own logits all the same."""

    model: Path
    stats: Path
    classifier: cafe.SplitClassifier

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.classifier(PREPROCESSING(pixels)).numpy()


_SHARED: list[Files] = []


def shared_files(factory: pytest.TempPathFactory) -> Files:
    """The same for all modules of a test process."""
    if not _SHARED:
        _SHARED.append(make_files(factory.mktemp("model")))
    return _SHARED[0]


def make_files(folder: Path, seed: int = 0) -> Files:
    torch.manual_seed(seed)
    classifier = cafe.split_classifier(models.channels_last(models.build("cafe:digits-resnet", num_classes=10))).eval()
    images = PREPROCESSING(digits(512, "train"))
    classifier.train()
    with torch.no_grad():
        for _ in range(3):  # BatchNorm statistics, or all logits would be alike
            classifier(images)
    classifier.eval()
    model, stats = folder / "small.safetensors", folder / "stats.safetensors"
    models.save(model, classifier, "cafe:digits-resnet", PREPROCESSING, CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cafe.SourceWarning)  # three batches are not enough for its BatchNorm statistics
        cafe.FeatureStats.fit(classifier, images.split(128)).group(num_groups=8, seed=0).save(stats)
    return Files(model, stats, classifier)


def digits(count: int, split: str = "test") -> np.ndarray:
    return load_digits(split).images(range(count))


def png(pixels: np.ndarray, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def infer(
    client: httpx.Client, pixels: np.ndarray, request_id: str, model: str = "small", **parameters: object
) -> httpx.Response:
    """A request with binary pixels."""
    tensor = {"name": "images", "datatype": "UINT8", "shape": list(pixels.shape)}
    tensor["parameters"] = {"binary_data_size": pixels.nbytes}
    header = json.dumps({"id": request_id, "parameters": parameters, "inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    return client.post(f"/v2/models/{model}/infer", content=header + pixels.tobytes(), headers=headers)


def logits(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.reshape(answer.json()["outputs"][0]["data"], (-1, 10))


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.02)


def pause(client: httpx.Client) -> None:
    """Pauses the only model of a server, and waits for a step that has begun."""
    assert client.post("/api/pause").json()["ok"]
    refused = client.post("/api/rollback", json={"version": 10**9})  # rolling back waits for a step
    assert refused.status_code == 409 and "it is not kept" in refused.text


class Server:
    """`cafe-tta serve` on a free port. Leaves no process behind."""

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "cafe_tta", "serve", "--port", "0", *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)} | (env or {})
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self.url = ""
        self._known = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._known.wait(PATIENCE) or not self.url:
            self.kill()
            raise RuntimeError(f"the server did not start: {self.log}")

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def address(self) -> str:
        """As tritonclient wants it."""
        return self.url.removeprefix("http://")

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def until_ready(self) -> "Server":
        with self.client() as client:
            for _ in range(200):
                if client.get("/v2/health/ready").status_code == 200:
                    return self
                time.sleep(0.1)  # asks again; nothing depends on how long
        raise RuntimeError(f"the server is not ready: {self.log}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"serving \S+ on (http://[^\s\"]+)", line):
                self.url = found[1]
                self._known.set()
        self._known.set()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
