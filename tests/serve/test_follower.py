"""A follower's parts, without a network: what it takes from its leader, what it sends, and how it answers."""

from types import SimpleNamespace

import pytest
import torch

import cafe_tta as cafe
from cafe_tta import storage
from cafe_tta.serve import Service, Settings
from cafe_tta.serve.follower import Follower, Outbox
from cafe_tta.serve.leader import Followers, Outgoing, Standing, pack_images, unpack_images
from cafe_tta.serve.snapshots import Snapshots
from cafe_tta.serve.store import FORMAT, KIND

SETTINGS = Settings(name="small", step_images=8, validation_images=16, buffer_images=64, method="tent")


def adapter(seed: int = 0, method: str = "tent") -> cafe.Adapter:
    torch.manual_seed(seed)
    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    return cafe.create(method, cafe.split_classifier(torch.nn.Sequential(*layers, torch.nn.Linear(8, 4)).eval()))


def stepped(seed: int = 0) -> Snapshots:
    """A leader's snapshots, with version 1 published."""
    snapshots = Snapshots(adapter(seed), SETTINGS)
    snapshots.adapter(torch.rand(16, 3, 8, 8))
    snapshots.publish(1, contributions={"gate": 16})
    return snapshots


def changed(content: bytes, change) -> bytes:
    """A snapshot with other content, and a checksum that fits."""
    tensors, meta = storage.unpack(content, KIND, FORMAT, "it")
    change(tensors, meta)
    return storage.pack(KIND, FORMAT, tensors, meta)


def test_follower_takes_up_what_its_leader_exports():
    leader, follower = stepped(), Snapshots(adapter(), SETTINGS)
    assert follower.follow(leader.export(), "") == (leader.run, 1)
    images = torch.rand(4, 3, 8, 8)
    torch.testing.assert_close(follower.published.front(images).logits, leader.published.front(images).logits)
    assert follower.contributions == {"gate": 16}
    assert leader.export() is leader.export()  # packed once for all followers
    leader.back_to_source()
    assert follower.follow(leader.export(), leader.run) == (leader.run, 0)
    torch.testing.assert_close(follower.published.front(images).logits, follower.source(images).logits)


def fill(value: float):
    def change(tensors, meta):
        tensors["classifier.backbone.model.1.weight"].fill_(value)

    return change


def edit(**values):
    return lambda tensors, meta: meta.update(values)


@pytest.mark.parametrize(
    ("exported", "error"),
    [
        (lambda good: good[:-1] + bytes([good[-1] ^ 1]), "is damaged: its content does not match its checksum"),
        (lambda good: good[: len(good) // 2], "is not whole"),
        (lambda good: b"<html>", "is not whole"),
        (lambda good: storage.pack("other", 1, {}, {}), "expected a serve-snapshot file, but it holds 'other'"),
        (lambda good: changed(good, fill(float("nan"))), "NaN or infinite"),
        (lambda good: changed(good, fill(1e6)), "times as large as in the source model"),
        (lambda good: changed(good, lambda t, m: t.popitem()), "the state has no"),
        (lambda good: changed(good, edit(version=-5)), "expected `version` to be between 0"),
        (lambda good: changed(good, edit(run=None)), "expected the leader's snapshot to name the `run`"),
        (lambda good: stepped(seed=1).export(), "does not belong to this classifier"),
    ],
)
def test_a_snapshot_that_is_not_good_is_refused_and_changes_nothing(exported, error):
    leader, follower = stepped(), Snapshots(adapter(), SETTINGS)
    good = leader.export()
    follower.follow(good, "")
    images = torch.rand(4, 3, 8, 8)
    before = follower.published.front(images).logits
    with pytest.raises(ValueError, match=error):
        follower.follow(exported(good), leader.run)
    assert follower.published.version == 1
    torch.testing.assert_close(follower.published.front(images).logits, before)


def test_a_new_run_of_the_leader_may_give_its_versions_the_same_numbers():
    first, second, follower = stepped(), stepped(), Snapshots(adapter(), SETTINGS)
    follower.follow(first.export(), "")
    second.adapter(torch.rand(16, 3, 8, 8) * 3)
    second.publish(1)
    assert follower.follow(second.export(), first.run) == (second.run, 1)
    images = torch.rand(4, 3, 8, 8)
    torch.testing.assert_close(follower.published.front(images).logits, second.published.front(images).logits)
    assert len(follower.history) == 1


# Images


def outgoing(camera: str, value: float = 0.0, verified: bool = False) -> Outgoing:
    return Outgoing(camera, torch.full((3, 4, 4), value), verified, "request-1")


def test_images_arrive_as_they_were_sent():
    sent = [outgoing("gate", 1.0, verified=True), outgoing("yard", 2.0)]
    for ours, theirs in zip(unpack_images(pack_images(sent), (3, 4, 4), 8, 1e6), sent, strict=True):
        assert (ours.camera, ours.verified, ours.request) == (theirs.camera, theirs.verified, theirs.request)
        torch.testing.assert_close(ours.image, theirs.image)


@pytest.mark.parametrize(
    ("images", "meta", "error"),
    [
        (torch.zeros(1, 3, 5, 5), [{}], "expected float32 images of shape"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.float64), [{}], "expected float32 images of shape"),
        (torch.zeros(9, 3, 4, 4), [{}] * 9, "expected 1 to 8 images"),
        (torch.zeros(0, 3, 4, 4), [], "expected 1 to 8 images"),
        (torch.zeros(2, 3, 4, 4), [{}], "expected a camera for each of 2 images"),
        (torch.full((1, 3, 4, 4), float("nan")), [{}], "expected finite"),
        (torch.zeros(1, 3, 4, 4), [{"camera": "", "verified": False}], "expected a camera's name"),
        (torch.zeros(1, 3, 4, 4), [{"camera": "x", "verified": 1}], "`verified` to be true or false"),
        (torch.zeros(1, 3, 4, 4), ["x"], "expected a table"),
    ],
)
def test_images_that_no_follower_sends_are_refused(images, meta, error):
    with pytest.raises(ValueError, match=error):
        unpack_images(storage.pack("serve-images", 1, {"images": images}, meta), (3, 4, 4), 8, 1e6)


def test_outbox_is_bounded_and_cameras_take_turns():
    outbox = Outbox(6, verified=lambda name: name == "quiet")
    outbox.open = True
    outbox.add("quiet", torch.zeros(1))
    for number in range(20):
        outbox.add("loud", torch.full((1,), float(number)))
    assert (outbox.count, outbox.unsent) == (6, 15)
    assert [each.camera for each in outbox.take_out(2)] == ["quiet", "loud"]
    rest = outbox.take_out(10)
    assert [float(each.image) for each in rest] == [16.0, 17.0, 18.0, 19.0]  # the oldest were given up
    outbox.add("loud", torch.zeros(1))
    outbox.shut()
    assert (outbox.count, outbox.unsent, outbox.open) == (0, 16, False)


def test_followers_that_a_leader_remembers_are_bounded():
    followers = Followers()
    for number in range(1000):
        followers.note(f"f-{number}", 1, images=1)
    assert len(followers.describe()["followers"]) == 256 and followers.describe()["follower_images"] == 1000


# How it answers


@pytest.fixture
def follower():
    """A follower of version 1 whose leader said how it stands."""
    leader = Service(adapter(), SETTINGS, source_stats=None)
    made = Follower(adapter(), SETTINGS, None, SimpleNamespace(url="http://leader"))
    made._taken = made._snapshots.follow(stepped().export(), "")
    made._join(standing(leader), 0)
    return made


def standing(leader: Service, **changes) -> Standing:
    known = {"adapting": True, "source": ["clear"], "quarantined": {"odd": "flat frames"}, "opted_out": ["private"]}
    return Standing(**({"run": leader.standing().run, "version": 1} | known | changes))


def test_follower_answers_cameras_with_the_model_that_its_leader_chose(follower):
    cameras = ["clear", "gate", "odd", "private"]
    answers = follower.answer(torch.rand(4, 3, 8, 8), cameras, [True] * 4)
    assert answers.versions == [0, 1, 1, 1]  # with the very first image
    assert answers.adapted == [True, True, True, False]
    follower._followed.assess()
    assert follower.answer(torch.rand(4, 3, 8, 8), cameras, [True] * 4).versions == [0, 1, 1, 1]
    shown = {camera["camera"]: camera for camera in follower.status()["cameras"]}
    assert shown["odd"]["quarantined"] == "flat frames" and shown["clear"]["model"] == "source"
    assert shown["private"]["opted_out"]


def test_images_of_a_camera_that_was_opted_out_are_not_sent_any_more(follower):
    follower.answer(torch.rand(2, 3, 8, 8), ["gate", "yard"], [True] * 2)
    follower._join(standing(Service(adapter(), SETTINGS, None), opted_out=["yard"]), 0)
    assert [each.camera for each in follower._outbox.take_out(8)] == ["gate"]


def test_images_are_not_kept_for_a_leader_that_is_away_or_does_not_adapt(follower):
    def ask() -> list[bool]:
        return follower.answer(torch.rand(2, 3, 8, 8), ["gate"] * 2, [True] * 2).adapted

    assert ask() == [True, True] and follower._outbox.count == 2
    follower._lose("no answer")
    assert follower._outbox.count == 0 and follower.status()["leader"]["unsent_images"] == 2
    assert ask() == [False, False] and follower.status()["leader"]["unsent_images"] == 4
    assert follower.status()["state"] == "alone"
    follower._join(standing(Service(adapter(), SETTINGS, None), adapting=False), 0)
    assert ask() == [False, False] and follower.status()["state"] == "following"


def test_a_leader_needs_a_token():
    with pytest.raises(ValueError, match="expected `token` with `leader`"):
        Settings(leader="http://127.0.0.1:8080")
    with pytest.raises(ValueError, match="expected `leader` to be an address such as"):
        Settings(leader="127.0.0.1:8080", token="long-enough")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"run": "x"}', b"[" * 100_000])
def test_a_standing_that_is_none_is_refused(content):
    with pytest.raises(ValueError):
        Standing.read(content)
