"""Records as a benchmark writes them: one at a time, or those of every experiment, made up from a seed."""

import json
import statistics

import numpy as np

from cafe_tta import METHODS, corruptions
from cafe_tta.bench import paper

NEEDS = {name: kind.needs for name, kind in METHODS.items()}
RIVALS = [name for name, needs in NEEDS.items() if needs != "data"]


def record(method="cafe", accuracy=0.5, **changes):
    """One line of a results file, as the benchmark writes it. `a__b` changes the field b of a."""
    made = {
        "format": 1,
        "experiment": "table1",
        "method": method,
        "label": method,
        "needs": NEEDS.get(method),
        "config": {"batch_size": 256, "lr": 0.001, "answer": "before"},
        "dataset": "cifar10",
        "protocol": "all-mixed",
        "mode": "offline",
        "seed": 0,
        "episode": {"name": "mixed", "images": 10000, "domains": {"fog-5": 5000, "snow-5": 5000}, "digest": "ab"},
        "data": {"name": "cifar10:test", "images": 10000, "digest": "0123456789abcdef"},
        "corruptions": {"preset": "cifar", "seed": 0, "frost_is_standard": True, "official_files": True},
        "model": {"architecture": "timm:resnet26", "weights": "fedcba9876543210" * 4, "num_features": 2048},
        "source": {"data": "cifar10:train", "count": 50000, "num_groups": 128, "group_sizes": [181, 90, 20, 3, 1]},
        "accuracy": accuracy,
        "by_domain": {"fog-5": accuracy, "snow-5": accuracy},
        "stream": [accuracy] * 20,
        "frechet_before": None,
        "frechet_after": None,
        "alignment_before": None,
        "alignment_after": None,
        "seconds": 50.0,
        "images_per_second": 200.0,
        "peak_memory_mb": 900.0,
        "steps": 40,
        "refused": 0,
        "versions": {"cafe_tta": "0.1.0", "torch": "2.13.0"},
        "machine": {"processor": "a processor", "threads": 1},
        "finished": "2026-11-15T23:59:00Z",
    }
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        made[outer] = {**made[outer], inner: value} if inner else value
    return made


def save(folder, records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(made) + "\n" for made in records))
    return folder


def made_up(seeds=3, names=corruptions.NAMES, imagenet_severities=(1, 3, 5), seed=0):
    """Records of every experiment: the paper's numbers with noise, and the rest from a seeded generator."""
    random = np.random.default_rng(seed)

    def runs(experiment, dataset, protocol, mode="offline", methods=RIVALS, label="{}", k=128, **changes):
        severities = imagenet_severities if dataset == "imagenet" else (5,)
        every = [f"{name}-{severity}" for name in names for severity in severities]
        episodes = {
            "separated": {domain: [domain] for domain in every},
            "severity-mixed": {name: [f"{name}-{severity}" for severity in severities] for name in names},
            "all-mixed": {"mixed": every},
            "continual": {"continual": every},
        }.get(protocol, {"clean": ["clean"]})
        hardness = {domain: random.normal(0, 6) for domain in [*every, "clean"]}
        for number, method in enumerate(methods):
            theirs = paper.published(dataset, protocol, mode, method, k if experiment == "groups" else None)
            level = theirs.mean if isinstance(theirs, paper.Accuracy) else 55 + 1.6 * number - 0.004 * abs(k - 64)
            sizes = np.sort(np.maximum(1, random.dirichlet(np.full(k, 0.6)) * 2048).astype(int))[::-1]
            for run_seed in range(seeds):
                for name, domains in episodes.items():
                    found = {d: (level + hardness[d] + random.normal(0, 0.5)) / 100 for d in domains}
                    found = {d: float(np.clip(value, 0, 1)) for d, value in found.items()}
                    accuracy = statistics.fmean(found.values())
                    rise = -0.1 * np.exp(-np.arange(20) / 5) * (number > 0) + random.normal(0, 0.008, 20)
                    start = (30 if protocol == "separated" else 45) + abs(hardness[domains[0]])
                    left = start * (1 if method == "source" else 0.85 - 0.06 * number)
                    yield record(
                        method,
                        accuracy,
                        experiment=experiment,
                        dataset=dataset,
                        protocol=protocol,
                        mode=mode,
                        seed=run_seed,
                        label=label.format(method),
                        by_domain=found,
                        stream=np.clip(accuracy + rise, 0, 1).tolist(),
                        episode={
                            "name": name,
                            "images": 10000,
                            "domains": {d: 10000 // len(domains) for d in domains},
                            "digest": f"{name}{run_seed}",
                        },
                        source={"data": "train", "count": 50000, "num_groups": k, "group_sizes": sizes.tolist()},
                        frechet_before=start,
                        frechet_after=left + random.normal(0, 0.3),
                        alignment_before=start / 4,
                        alignment_after=left / 4,
                        seconds=float(20 * (1 + number) * random.uniform(0.9, 1.1)),
                        refused=int(method == "cafe" and k == 8) * 3,
                        **changes,
                    )

    imagenet = {"model__architecture": "torchvision:resnet50", "data__name": "imagenet:val"}
    for mode, kind in (("offline", "table1"), ("online", "online")):
        for dataset in ("digits", "cifar10", "cifar100"):
            for protocol in ("separated", "all-mixed"):
                yield from runs(kind, dataset, protocol, mode)
        for protocol in ("separated", "severity-mixed", "all-mixed"):
            yield from runs(kind, "imagenet", protocol, mode, corruptions__frost_is_standard=False, **imagenet)
    yield from runs("continual", "cifar10", "continual", "online")
    yield from runs("shift", "mnist", "shift")
    for dataset in ("cifar10", "cifar100", "imagenet"):
        yield from runs("same", dataset, "clean")
        yield from runs("dann", dataset, "all-mixed", methods=["source", "cafe", "dann"])
    for dataset in ("cifar100", "imagenet"):
        for k in (8, 16, 32, 64, 128, 256, 512, 1024):
            yield from runs("groups", dataset, "all-mixed", methods=["cafe"], label=f"{{}} k={k}", k=k)


def table(made, name):
    return next(table for table in made.tables if table.name == name)


def cells(made, name, label):
    return [cell.text for line in table(made, name).lines if line.head[0] == label for cell in line.cells]
