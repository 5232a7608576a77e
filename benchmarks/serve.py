"""What the server costs, against the same adapter called directly, in the same run. Prints a Markdown table.

python benchmarks/serve.py                                   # throughput, latency, memory over 20,000 images
python benchmarks/serve.py --memory-images 100000
python benchmarks/serve.py --only latency --threads 2

Serves the embedded digits model. Accuracy of simulated cameras: cafe-tta serve, cafe-tta simulate.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

import cafe_tta as cafe
from cafe_tta import corruptions, data
from cafe_tta.bench.embedded import Embedded, embedded_digits
from cafe_tta.serve import Settings
from cafe_tta.simulate.client import Client

PARTS = ("throughput", "latency", "memory")
METHOD = "cafe"  # that both sides adapt with
REQUEST = 64  # images
SEVERITIES = {"fog": 4, "frost": 3, "gaussian_noise": 5, "brightness": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--rounds", type=int, default=5, help="of each side, in turns")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    parser.add_argument("--clients", type=int, default=4, help="connections that keep the server busy")
    parser.add_argument("--single", type=int, default=200, help="single images for the latency")
    parser.add_argument("--memory-images", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, on both sides")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    embedded = embedded_digits(say=print)
    print(f"embedded digits, {args.threads} threads of PyTorch on each side, {os.cpu_count()} cores\n", flush=True)
    print("| what | measured | against | limit | ratio | goal |\n|---|---:|---|---:|---:|---:|", flush=True)
    if "throughput" in args.only:
        throughput(embedded, args)
    if "latency" in args.only:
        latency(embedded, args)
    if "memory" in args.only:
        memory(args)


def row(what: str, measured: str, against: str, limit: str, ratio: float, goal: str) -> None:
    print(f"| {what} | {measured} | {against} | {limit} | {ratio:.3f} | {goal} |", flush=True)


# Throughput


def throughput(embedded: Embedded, args: argparse.Namespace) -> None:
    """Images a second, 64 a request, of a server that is never idle; and of the adapter itself, in turns."""
    requests = pixels()
    prepare = embedded.model.preprocessing
    for what, flags, goal in (("adapting", (), "≥ 0.9"), ("not adapting", ("--no-adapt",), "")):
        adapter = cafe.create(METHOD, embedded.classifier, embedded.stats)
        call: Callable[[torch.Tensor], object] = adapter.predict if flags else adapter
        with serving(args.threads, *flags) as (url, _):
            sides = {
                "server": lambda url=url: rate_of_server(url, requests, args.clients, args.seconds),
                "direct": lambda call=call: rate(lambda images: call(prepare(images)), requests, args.seconds),
            }
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(args.rounds + 1):
                for name, side in sides.items():
                    settled(url)
                    found = side()
                    if number:  # the first round warms up
                        rates[name].append(found)
        served, direct = (statistics.median(rates[name]) for name in ("server", "direct"))
        against = "adapter.predict(images)" if flags else "adapter(images)"
        row(f"throughput, {REQUEST} images a request, {what}", f"{served:.0f}/s", against, f"{direct:.0f}/s",
            served / direct, goal)  # fmt: skip


def rate(answer: Callable[[np.ndarray], object], requests: list[np.ndarray], seconds: float) -> float:
    start, done = time.perf_counter(), 0
    for images in itertools.cycle(requests):
        answer(images)
        done += len(images)
        if (passed := time.perf_counter() - start) >= seconds:
            return done / passed
    raise AssertionError("a cycle does not end")


def rate_of_server(url: str, requests: list[np.ndarray], clients: int, seconds: float) -> float:
    rates = [0.0] * clients
    errors: list[Exception] = []

    def work(number: int) -> None:
        client = Client(url)
        try:
            rates[number] = rate(lambda images: client.classify("digits", images, f"gate-{number}"), requests, seconds)
        except Exception as error:
            errors.append(error)
        finally:
            client.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(rates)


# Latency


def latency(embedded: Embedded, args: argparse.Namespace) -> None:
    """Of single images that come now and then, against a bare forward pass in this process."""
    image = pixels()[0][:1]
    tensor = embedded.model.preprocessing(image)
    delay = Settings().max_queue_delay_microseconds / 1000
    forward, asked = [], []
    with serving(args.threads) as (url, _):
        client = Client(url)
        for number in range(args.single + 20):
            time.sleep(0.03)  # light load
            start = time.perf_counter()
            with torch.inference_mode():
                embedded.classifier(tensor)
            middle = time.perf_counter()
            client.classify("digits", image, "gate")
            end = time.perf_counter()
            if number >= 20:
                forward.append(1000 * (middle - start))
                asked.append(1000 * (end - middle))
        client.close()
    bare, found = statistics.median(forward), statistics.median(asked)
    limit = bare + delay + 5
    row("p50 latency of single images", f"{found:.2f} ms", f"forward {bare:.2f} + queue delay {delay:.2f} + 5 ms",
        f"{limit:.2f} ms", found / limit, "≤ 1")  # fmt: skip
    worst = float(np.percentile(asked, 95))
    row("p95 latency of single images", f"{worst:.2f} ms", "the same", f"{limit:.2f} ms", worst / limit, "")


# Memory


def memory(args: argparse.Namespace) -> None:
    """Resident memory of the server while images of 20 cameras come; the first fifth warms up."""
    requests = pixels()
    samples: list[tuple[int, float]] = []
    with serving(args.threads, "--save-every", "5") as (url, process):
        client = Client(url)
        done = 0
        for number, images in enumerate(itertools.cycle(requests)):
            client.classify("digits", images, f"gate-{number % 20}")
            done += len(images)
            if number % 16 == 0:
                samples.append((done, resident(process.pid)))
            if done >= args.memory_images:
                break
        client.close()
        samples.append((done, resident(process.pid)))
    warm = [size for images, size in samples if images >= done / 5]
    third = max(1, len(warm) // 3)
    first, last = statistics.median(warm[:third]), statistics.median(warm[-third:])
    row(f"memory over {done} images", f"{last:.0f} MB at the end", "after a fifth of them", f"{first:.0f} MB",
        last / first, "≤ 1.02")  # fmt: skip


def resident(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        found = re.search(r"VmRSS:\s+(\d+) kB", file.read())
    assert found is not None
    return int(found[1]) / 1024


# The server


@contextmanager
def serving(threads: int, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`cafe-tta serve` in a process of its own, ready."""
    command = [sys.executable, "-m", "cafe_tta", "serve", "--method", METHOD, "--port", "0", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if found := re.match(r"serving \S+ on (http://\S+)", line):
                url = found[1]
                break
        if not url:
            raise RuntimeError("the server did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or a full pipe would stop it
        client = Client(url)
        client.until_ready(60)
        client.close()
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def settled(url: str) -> None:
    """Waits until the server has adapted to all it was shown: it must not compete with the other side."""
    client = Client(url)
    before = None
    while (now := client.get("/api/status")["steps"]) != before:
        before = now
        time.sleep(0.7)
    client.close()


def pixels() -> list[np.ndarray]:
    """Digits in requests, corrupted in several ways, so that there is something to adapt to."""
    digits = data.load("digits:test")
    clean = digits.images(range(len(digits) // REQUEST * REQUEST))
    mixed = [corruptions.corrupt(clean, name, severity) for name, severity in SEVERITIES.items()]
    together = np.concatenate([clean, *mixed])
    return list(together[np.random.default_rng(0).permutation(len(together))].reshape(-1, REQUEST, 32, 32, 3))


if __name__ == "__main__":
    main()
