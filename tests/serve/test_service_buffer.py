"""The buffer: bounded in every direction, and as fair to each camera as what came allows."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from cafe_tta.serve.buffer import REUSE, Buffer, Item, _Pool


def fill(buffer, counts):
    for name, count in counts.items():
        for number in range(count):
            buffer.add(name, torch.tensor([float(number)]))


def shares(items):
    return Counter(item.camera for item in items)


def test_no_camera_dominates_a_step():
    buffer = Buffer(400)
    fill(buffer, {"flood": 10_000, "a": 150, "b": 150, "c": 20})
    assert len(buffer) <= 400
    found = shares(buffer.take(120))
    assert found["c"] == 15 and abs(found["a"] - found["b"]) <= 1 and found["flood"] <= found["a"] + 1
    assert sum(found.values()) == 120


def test_a_flood_after_the_others_does_not_push_them_out():
    buffer = Buffer(200)
    fill(buffer, {"a": 40, "b": 40})
    fill(buffer, {"flood": 5_000})
    sizes = buffer.sizes()
    assert sizes["a"] == sizes["b"] == 40 and sizes["flood"] <= 200 // 3 + 1


def test_validation_images_are_never_taken():
    buffer = Buffer(400)
    fill(buffer, {"a": 100, "b": 100})
    validation = {id(item) for item in buffer.validation(1000)}
    taken = {id(item) for _ in range(2 * REUSE) for item in buffer.take(1000)}
    assert len(validation) == 50 and len(taken) == 150 and not validation & taken


def test_an_image_is_used_a_few_times_at_most():
    buffer = Buffer(400)
    fill(buffer, {"a": 100})
    uses = Counter(id(item) for _ in range(3 * REUSE) for item in buffer.take(75))
    assert set(uses.values()) == {REUSE} and buffer.take(75) == []


def test_fresh_images_come_first():
    buffer = Buffer(400)
    fill(buffer, {"a": 40})
    first = set(map(id, buffer.take(30)))
    fill(buffer, {"a": 40})
    assert not first & set(map(id, buffer.take(30)))


def test_a_camera_that_sees_one_class_for_long_keeps_images_of_others():
    buffer = Buffer(80)  # 60 wait
    for number in range(400):
        buffer.add("gate", torch.tensor([float(number)]), label=1 if number < 40 else 2)
    waiting = Counter(item.label for item in buffer._shares["gate"].waiting)
    assert waiting.total() == 60 and abs(waiting[1] - waiting[2]) <= 2
    assert Counter(item.label for item in buffer.take(20)) == {1: 10, 2: 10}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_what_a_full_share_gives_up_is_of_the_class_that_it_has_most_of(labels, unwanted, rng):
    pool = _Pool()
    for number, label in enumerate(labels):
        pool.add(Item("a", "a", torch.zeros(1), number, label=label))
    assert pool.keep(lambda item: item.label != unwanted) == labels.count(unwanted)
    left = [label for label in labels if label != unwanted]
    while left:
        assert sorted(item.label for item in pool) == sorted(left) and len(pool) == len(left)
        pool.remove_superfluous(rng)
        (gone,) = (Counter(left) - Counter(item.label for item in pool)).elements()
        assert left.count(gone) == max(Counter(left).values())
        left.remove(gone)
    assert not len(pool) and not list(pool)


def test_images_of_a_step_come_in_no_order():
    buffer = Buffer(400)
    fill(buffer, {"a": 100, "b": 100})
    taken = [item.camera for item in buffer.take(100)]
    assert taken.count("a") == 50 and taken != sorted(taken) and taken != sorted(taken, reverse=True)


def test_ready_counts_what_no_step_has_used():
    buffer = Buffer(400)
    fill(buffer, {"a": 84})
    assert not buffer.ready(64)
    buffer.add("a", torch.zeros(1))
    assert buffer.arrived == 64 and buffer.ready(64)
    buffer.take(64)
    assert buffer.arrived == 0 and not buffer.ready(64)


def test_missing_is_what_the_next_step_takes_at_most():
    buffer = Buffer(400)
    for images in (*[86] * 3, *[171] * 3):  # from the fourth step on, used images take up the room
        for number in range(images):
            assert 0 < buffer.missing(64) <= 128 and not buffer.ready(64), number
            before = buffer.missing(64)
            buffer.add("a", torch.zeros(1))
            assert buffer.missing(64) <= before
            if buffer.ready(64):
                break
        assert buffer.missing(64) == 0 and number <= images
        buffer.take(64)


def test_images_are_copied():
    buffer = Buffer(16)
    image = torch.zeros(4)
    buffer.add("a", image)
    image.fill_(1)
    assert buffer.take(1)[0].image.sum() == 0


def test_newcomers_have_one_share():
    buffer = Buffer(300)
    for number in range(1000):
        buffer.add(f"invented-{number}", torch.zeros(1), owner="")
    fill(buffer, {"a": 100, "b": 100})
    found = buffer.take(90)
    assert sum(item.owner == "" for item in found) == 30
    buffer.drop("invented-999")
    assert "invented-999" not in shares(buffer.take(300)) | shares(buffer.validation(300))


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 40)), max_size=20),
    st.integers(8, 60),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(1, 5),
    st.integers(1, 50),
)
def test_bounds_hold_for_any_traffic(traffic, capacity, per_camera, max_shares, count):
    buffer = Buffer(capacity, per_camera, max_shares)
    for number, (name, images) in enumerate(traffic):
        fill(buffer, {name: images})
        if number % 3 == 2:
            assert len(buffer.take(count)) <= count
        if number % 5 == 4:
            buffer.drop(name)
        sizes = buffer.sizes()
        assert sum(sizes.values()) == len(buffer) <= capacity and len(sizes) <= max_shares
        assert per_camera is None or all(size <= per_camera + 1 for size in sizes.values())
    assert len(buffer.validation(count)) <= count
