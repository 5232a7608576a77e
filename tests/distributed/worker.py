"""What one rank does in the tests of this folder: python -m torch.distributed.run … worker.py <job> [argument].

A job raises where something is wrong; the reference is an adapter of this process alone that gets the whole batch.
"""

import hashlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import cafe_tta as cafe
from conftest import make_source

METHODS = ("cafe", "cafe-dimwise", "cafe-no-infomax", "infomax", "tent", "fr", "bacs", "adabn", "t3a", "source")
VARIANTS: list[tuple[str, dict]] = [
    *((name, {}) for name in METHODS),
    ("cafe", {"normalisation": "blend", "answer": "after"}),
    ("cafe", {"normalisation": "source"}),
    ("cafe", {"samples_per_dim": 20, "every": 2}),
    ("cafe", {"gate": True, "gate_patience": 1, "gate_margin": 4.0}),
    ("cafe", {"parameters": "norm", "optimizer": "adam", "answer": "after-eval"}),
    ("cafe-no-infomax", {"adapt_from": "late"}),
    ("tent", {"answer": "after-eval", "min_batch": 5}),
    ("eta", {"max_entropy": 0.97, "max_similarity": 1.0, "optimizer": "adam"}),
    ("eata", {"max_entropy": 0.99, "max_similarity": 0.97, "reset_every": 3}),
    ("neo", {}),
    ("adabn", {"momentum": None}),
    ("adabn", {"prior": 16}),
    ("unmix", {}),
    ("cafe-plus", {}),
]
SPLITS = {  # images of each rank, batch by batch
    2: [(24, 24), (40, 8), (0, 48), (1, 3), (48, 0), (1, 0), (9, 8)],
    3: [(16, 16, 16), (30, 0, 18), (0, 0, 48), (1, 1, 1), (0, 1, 0), (5, 40, 3), (2, 9, 1)],
}


class BatchNormAct(nn.BatchNorm2d):
    """As libraries have it: BatchNorm and the activation in one layer."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).relu()


class Network(nn.Module):
    """Two branches, so that BatchNorm layers get their gradients in an order that the ranks share; a view by size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), BatchNormAct(6))
        self.late = nn.Sequential(nn.Conv2d(6, 12, 3), BatchNormAct(12), nn.Dropout(0.5), nn.Conv2d(12, 12, 1))
        self.norm = nn.BatchNorm2d(12)
        self.short = nn.Sequential(nn.Conv2d(6, 12, 3, bias=False), nn.BatchNorm2d(12))
        self.head = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        early = self.early(images)
        joined = (self.norm(self.late(early)) + self.short(early)).relu()
        return self.head(joined.mean((2, 3)).view(len(images), -1))


SOURCE = make_source(Network())


def images_of_batch(number: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    kind = 1.0 if number % 3 == 1 else 1.7  # every third batch looks like the source: the gate has something to decide
    return (torch.randn(size, 3, 10, 10, generator=generator) * kind + (kind - 1)).double()


def create(name: str, **options: object) -> cafe.Adapter:
    return cafe.create(name, SOURCE.classifier, SOURCE.needs[cafe.METHODS[name].needs], **options).double()


def alone(name: str, **options: object) -> cafe.Adapter:
    with cafe.distributed.apart():
        return create(name, **options)


def part(images: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    return images.split(list(sizes))[rank]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=lambda text: f"{what}: {text}")


def expect(good: bool, what: str) -> None:
    if not good:
        raise AssertionError(what)


def expect_same_state(adapter: cafe.Adapter, reference: cafe.Adapter, what: str) -> None:
    expected = reference.state()
    state = adapter.state()
    expect(state.keys() == expected.keys(), f"{what}: {state.keys() ^ expected.keys()}")
    for key, value in state.items():
        close(value, expected[key], f"{what}, {key}")
    expect(adapter.counters == reference.counters, f"{what}: {adapter.counters}, not {reference.counters}")


def expect_bit_equal(adapter: cafe.Adapter, what: str) -> None:
    digest = hashlib.sha256()
    for name, tensor in sorted(adapter.state().items()):
        digest.update(name.encode() + bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))
    found: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, digest.hexdigest())
    expect(len(set(found)) == 1, f"{what}: the ranks differ")


def expect_same_report(adapter: cafe.Adapter, reference: cafe.Adapter, what: str) -> None:
    found, expected = adapter.report, reference.report
    assert found is not None and expected is not None
    for name in ("images", "stepped", "refused"):
        expect(getattr(found, name) == getattr(expected, name), f"{what}: {found}, not {expected}")
    expect(bool(found.reason) == bool(expected.reason), f"{what}: {found}, not {expected}")
    expect((found.loss is None) == (expected.loss is None), f"{what}: {found}, not {expected}")
    if found.loss is not None:
        close(torch.tensor(found.loss), torch.tensor(expected.loss), what)
    notes = dict(found.notes)
    expect(notes.pop("bytes") > 0, f"{what}: no bytes were reported")
    expect(notes.keys() == expected.notes.keys(), f"{what}: {notes}, not {expected.notes}")


# Jobs


def same_step(rank: int, variants: list[tuple[str, dict]] = VARIANTS) -> None:
    """Every method takes the steps of one process, even where ranks have unequal parts, or none."""
    for name, options in variants:
        adapter, reference = create(name, **options), alone(name, **options)
        stepped = set()
        for number, sizes in enumerate(SPLITS[distributed.get_world_size()]):
            what = f"{name} {options}, batch {number} of {sizes}"
            images = images_of_batch(number, sum(sizes))
            expected = reference(images)
            logits = adapter(part(images, sizes, rank))
            expect(logits.shape == (sizes[rank], 4), f"{what}: logits of shape {tuple(logits.shape)}")
            close(logits, part(expected, sizes, rank), f"{what}, logits")
            expect_same_report(adapter, reference, what)
            expect_same_state(adapter, reference, what)
            expect_bit_equal(adapter, what)
            stepped.add(reference.report.stepped)
        if "gate" in options or "every" in options:
            expect(stepped == {True, False}, f"{name} {options}: nothing was decided")
        # What a rank predicts by itself it tells nobody.
        close(adapter.predict(images[:8]), reference.predict(images[:8]), f"{name} {options}, predict")
        adapter.reset()
        reference.reset()
        expect_same_state(adapter, reference, f"{name} {options}, reset")


def batchnorm_apart(rank: int) -> None:
    """sync_batchnorm=False: each rank normalises with its own images; running statistics are averaged."""
    world = distributed.get_world_size()
    for sizes in [(30, 18, 7)[:world], (0, 30, 20)[:world]]:
        images = images_of_batch(0, sum(sizes))
        parts = [own for own in images.split(list(sizes)) if len(own)]
        for name, options in [("adabn", {}), ("infomax", {}), ("infomax", {"normalisation": "blend"}), ("tent", {})]:
            what = f"{name} {options} apart, {sizes}"
            step = {} if name == "adabn" else {"momentum": 0.0, "lr": 0.1}
            adapter = create(name, sync_batchnorm=False, **options, **step)
            logits = adapter(part(images, sizes, rank))
            answered = [alone(name, **options) for _ in parts]
            answers = torch.cat([each(own) for each, own in zip(answered, parts, strict=True)])
            close(logits, part(answers, sizes, rank), f"{what}, logits")
            for key, value in adapter.state().items():
                if "running" in key:
                    weighed = [len(own) / len(images) * a.state()[key] for own, a in zip(parts, answered, strict=True)]
                    close(value, torch.stack(weighed).sum(0), f"{what}, {key}")
            expect_bit_equal(adapter, what)
            if name == "adabn":
                continue
            plain = alone(name, **options)
            plain.normaliser.adapting(update=False)
            all_logits = torch.cat([plain.run(own)[1] for own in parts])
            entropy, infomax = cafe.losses.entropy(all_logits).mean(), cafe.losses.infomax(all_logits)
            (entropy if name == "tent" else infomax).backward()
            for (key, found), before in zip(
                adapter.classifier.named_parameters(), plain.classifier.parameters(), strict=True
            ):
                moved = before if before.grad is None else before - 0.1 * before.grad
                close(found.detach(), moved.detach(), f"{what}, {key}")

    small = create("infomax", sync_batchnorm=False)
    small(part(images_of_batch(0, 9), (8, 1, 0)[:world], rank))
    expect(not small.report.stepped and "a batch of 1 is too small" in small.report.reason, str(small.report))


def bad_batches(rank: int) -> None:
    """What is bad on one rank raises on all, and leaves no trace."""
    adapter, undisturbed = create("cafe"), alone("cafe")
    world = distributed.get_world_size()
    good = images_of_batch(0, 12 * world)
    own = good.split(12)[rank]
    adapter(own)
    undisturbed(good)
    nan = own.clone()
    nan[3] = torch.nan
    bad = [
        (0, nan, "images [3] of the batch have NaN"),
        (1, own.tolist(), "expected a tensor of images, but got list"),
        (1, own.float(), "expected images of torch.float64"),
        (0, own.repeat(1, 2, 1, 1), "the classifier cannot read images of shape (2, 6, 10, 10)"),
        (1, own[:0, :0], "expected a batch of at least one image, but got shape (0, 0, 10, 10)"),
    ]
    for guilty, batch, text in bad:
        said = error_of(adapter, batch if rank == guilty else own, (TypeError, ValueError))
        expect(text in said, f"expected {text!r}, but got {said!r}")
        if rank != guilty:
            expect(f"rank {guilty} was given a bad batch, and so no rank adapts" in said, said)
    said = error_of(adapter, own[:, :, :8] if rank == 1 else own, (ValueError,))
    expect("on rank 0 images of shape (3, 10, 10); on rank 1 images of shape (3, 8, 10)" in said, said)
    said = error_of(adapter, own[:0], (ValueError,))
    expect("no rank has any" in said, said)
    expect_same_state(adapter, undisturbed, "after bad batches")

    huge = own * 1e300 if rank == 1 else own
    before = {key: value.clone() for key, value in adapter.state().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter(huge)
    expect(any(issubclass(w.category, cafe.StepRefused) for w in caught), "nobody was warned")
    expect(adapter.report.refused and adapter.report.reason.startswith("on rank "), str(adapter.report))
    for key, value in adapter.state().items():
        expect(torch.equal(value, before[key]), f"a refused step changed {key}")
    adapter(own)
    undisturbed.counters = cafe.adapter.Counters(2, 24 * world, 1, 1)  # it was not shown the batch that all refused
    undisturbed(good)
    expect_same_state(adapter, undisturbed, "after a refused batch")


def unlike(rank: int) -> None:
    """Ranks that are not alike are told so, on every rank; and the rest of the job goes on."""
    adapter = create("infomax")
    adapter.ranks.check_every = 2
    own = images_of_batch(0, 8)
    with torch.no_grad():
        adapter(own)
        next(adapter.classifier.parameters())[0, 0, 0, 0] += 1e-12 * rank
        adapter(own)
        said = error_of(adapter, own, (cafe.RankError,))
    others = "rank 1" if distributed.get_world_size() == 2 else "ranks 1, 2"
    expect(f"the ranks diverged: {others} and rank 0 hold other weights" in said, said)
    adapter.ranks.check_every = 100

    lighter = SOURCE.needs["stats"]
    heavier = cafe.SourceStats(lighter.mean + 1, lighter.groups, lighter.covs, lighter.meta)
    other = cafe.CAFe(SOURCE.classifier, heavier if rank else lighter).double()
    said = error_of(other, own, (cafe.RankError,))
    expect("expected every rank to do the same, but got on rank 0 batch 0 of cafe, made of " in said, said)

    try:
        create("cafe", max_entropy=0.5)
    except ValueError as error:
        expect("cafe filters by entropy (max_entropy) in one process" in str(error), str(error))
    else:
        raise AssertionError("a filter that ranks cannot share was accepted")

    class Careless(cafe.Infomax):
        name = "careless"

        def loss(self, features: Tensor, logits: Tensor) -> Tensor:
            return cafe.losses.infomax(logits)

    with_own = Careless(SOURCE.classifier).double()
    said = error_of(with_own, images_of_batch(rank, 8), (cafe.RankError,))
    expect("expected the same loss on every rank" in said and "through its `ranks`" in said, said)
    fresh = create("infomax")
    fresh(own)  # nobody waits for anybody

    try:
        create("dann")
    except ValueError as error:
        expect("dann cannot adapt as one over the" in str(error), str(error))
    else:
        raise AssertionError("dann was accepted")
    alone("dann")

    said = error_of(create("infomax", lr=0.1 + rank), own, (cafe.RankError,))
    expect("with StepConfig(batch_size=256, lr=1.1" in said, said)
    before = {key: value.clone() for key, value in fresh.state().items()}
    fresh.counters.batches += rank
    said = error_of(fresh, own, (cafe.RankError,))
    expect("got on rank 0 batch 1 of infomax" in said and "on rank 1 batch 2 of infomax" in said, said)
    expect(all(torch.equal(value, before[key]) for key, value in fresh.state().items()), "ranks out of step adapted")
    fresh.reset()
    fresh(own)

    # The last, because a rank that leaves in the middle of a step cannot go on, and nobody without it.
    if rank == 0:
        fresh.run = lambda images: 1 / 0
        error_of(fresh, own, (ZeroDivisionError,))
        said = error_of(create("infomax"), own, (cafe.RankError,))
        expect("this rank left the others: ZeroDivisionError" in said, said)
    else:
        said = error_of(fresh, own, (cafe.RankError,))
        expect("died or did not answer in time" in said and "start again from the last saved state" in said, said)


def error_of(adapter: cafe.Adapter, batch: object, kinds: tuple[type[Exception], ...]) -> str:
    try:
        adapter(batch)
    except kinds as error:
        return str(error)
    raise AssertionError("expected an error")


def save(rank: int, path: str) -> None:
    adapter = create("cafe", optimizer="adam")
    sizes = (20, 28) if distributed.get_world_size() == 2 else (20, 20, 8)
    for number in range(3):
        adapter(part(images_of_batch(number, 48), sizes, rank))
    if rank == 0:  # the others hold the same
        adapter.save(path)
    distributed.barrier()


def resume(rank: int, path: str) -> None:
    adapter, reference = create("cafe", optimizer="adam"), alone("cafe", optimizer="adam")
    adapter.load(path)
    reference.load(path)
    for number in range(3, 6):
        images = images_of_batch(number, 48)
        reference(images)
        adapter(part(images, (10, 0, 38) if distributed.get_world_size() == 3 else (10, 38), rank))
    expect_same_state(adapter, reference, "resumed")
    if rank == 0:
        adapter.save(path)


def all_of_two(rank: int, path: str) -> None:
    same_step(rank)
    batchnorm_apart(rank)
    bad_batches(rank)
    save(rank, path)
    unlike(rank)


def all_of_three(rank: int, path: str) -> None:
    resume(rank, path)
    same_step(rank, VARIANTS[:-11])
    batchnorm_apart(rank)
    bad_batches(rank)
    unlike(rank)


def two_hosts(rank: int, path: str) -> None:
    same_step(rank, [("cafe", {})])


def die(rank: int, path: str) -> None:
    adapter = create("cafe")
    own = images_of_batch(0, 12)
    for number in range(20):
        if number == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        adapter(own)
        if rank == 0:
            adapter.save(path)


def hang(rank: int, path: str) -> None:
    adapter = create("cafe")
    own = images_of_batch(0, 12)
    adapter(own)
    if rank == 1:
        time.sleep(600)
    adapter(own)


def main() -> None:
    job, path = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "")
    with cafe.distributed.joined(timeout=float(os.environ.get("RANKS_TIMEOUT", "120"))) as rank:
        globals()[job](rank, path)
    print(f"done: {job} on rank {rank}", flush=True)


if __name__ == "__main__":
    main()
