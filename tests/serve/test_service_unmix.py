"""Methods that unmix, behind the service: judged, published, rolled back and saved with their clusters."""

import pytest
import torch

import cafe_tta as cafe
from cafe_tta.serve import Service, Settings
from cafe_tta.serve.cameras import RECENT
from cafe_tta.serve.snapshots import Replica

WAIT = 60.0
UNMIXING = {"unmix": {}, **{name: {"normalisation": "unmix"} for name in ("tent", "cafe", "fr", "bacs")}}


@pytest.fixture
def serve(source):
    """Makes services that are closed at the end, whatever happens."""
    made = []

    def make(method="unmix", **config):
        stats = source.needs["stats"]
        needed = source.needs[cafe.METHODS[method].needs]
        adapter = cafe.create(method, source.classifier, needed, styles=stats.styles, **UNMIXING[method])
        plain = {"step_images": 32, "buffer_images": 256, "validation_images": 32, "adapt_share": 1.0, "gate": False}
        service = Service(adapter, Settings(**(plain | config)), stats)
        made.append(service)
        service.start()
        return service

    yield make
    for service in made:
        service.close(WAIT)


def noisy(count, seed=0):
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) * 2.5 + 0.5


def grey(count, seed=0):
    """Hardly any contrast, and smooth."""
    coarse = torch.randn(count, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(10, 10), mode="bicubic") * 0.1 - 1


def send(service, rounds=4, start=0):
    """Two cameras whose images are corrupted differently."""
    for seed in range(start, start + rounds):
        images = torch.cat([noisy(16, seed), grey(16, seed)])
        service.answer(images, ["noisy"] * 16 + ["grey"] * 16, [True] * 32)
        assert service.settle(WAIT)
    return service.status()


def published(service):
    return service._snapshots.published.front.clusters


@pytest.mark.parametrize("method", UNMIXING)
def test_every_method_that_unmixes_is_served_judged_and_taken_up_again(source, serve, method, tmp_path):
    service = serve(method, state=tmp_path)
    status = send(service)
    assert status["steps"]["accepted"] > 0
    assert not [event for event in status["events"] if event["kind"] == "error"]
    counts = {cluster["cluster"]: cluster["images"] for cluster in status["clusters"]}
    assert len(counts) >= 2 and counts == service._adaptation.adapter.clusters.counts
    assert sum(cluster["share"] for cluster in status["clusters"]) == pytest.approx(1)
    images = torch.cat([noisy(4, 99), grey(4, 99)])
    expected, version = service.probe(images), status["version"]
    assert torch.equal(expected, service._adaptation.adapter.predict(images))
    assert not torch.allclose(expected, source.classifier(images), atol=1e-3)
    service.close(WAIT)
    again = serve(method, state=tmp_path)
    again.answer(torch.cat([noisy(16, 98), grey(16, 98)]), ["noisy"] * 16 + ["grey"] * 16, [False] * 32)  # judged
    assert again.status()["version"] == version and again.status()["clusters"] == status["clusters"]
    assert torch.equal(again.probe(images), expected)
    status = send(again, 2, start=10)
    assert sum(status["steps"].values()) > 0  # it goes on
    assert not [event for event in status["events"] if event["kind"] == "error"]


def test_cameras_show_the_clusters_of_their_recent_images(serve):
    service = serve(judge=False)
    send(service, 6)
    assert all(camera["clusters"] == [] for camera in service.status()["cameras"])  # of the last version: none yet
    for seed in range(6):
        service.answer(torch.cat([noisy(16, seed), grey(16, seed)]), ["noisy"] * 16 + ["grey"] * 16, [False] * 32)
    cameras = {camera["camera"]: camera["clusters"] for camera in service.status()["cameras"]}
    shown = {name: {entry["cluster"] for entry in clusters} for name, clusters in cameras.items()}
    assert shown["noisy"] and shown["grey"] and not shown["noisy"] & shown["grey"]
    for clusters in cameras.values():
        shares = [entry["share"] for entry in clusters]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1 + 1e-9
    assert shown["noisy"] | shown["grey"] <= set(published(service))
    assert all(len(camera.clusters) <= RECENT for camera in service._cameras)
    service.reset()
    status = service.status()
    assert status["clusters"] == [] and all(camera["clusters"] == [] for camera in status["cameras"])


def test_the_source_model_answers_exactly_and_its_images_fall_into_no_cluster(source, serve):
    service = serve("cafe", judge=False)
    send(service)
    for camera in service._cameras:
        camera.gain = 1.0 if camera.name == "grey" else None  # adapting did not help it
    service._cameras.get("grey").clusters.clear()
    service._cameras.get("grey").source_drift = service._cameras.get("noisy").source_drift = 2.0
    images = torch.cat([noisy(5, 50), grey(5, 50)])
    order = torch.tensor([0, 5, 1, 6, 2, 7, 3, 8, 4, 9])  # both in one batch, in turns
    names = ["noisy" if i < 5 else "grey" for i in order.tolist()]
    answers = service.answer(images[order], names, [False] * 10)
    of_source = torch.tensor([name == "grey" for name in names])
    assert torch.equal(answers.logits[of_source], source.classifier(images[5:]).detach())
    torch.testing.assert_close(answers.logits[~of_source], service.probe(images[:5]))
    cameras = {camera["camera"]: camera["clusters"] for camera in service.status()["cameras"]}
    assert cameras["grey"] == [] and cameras["noisy"]


def test_without_unmixing_there_are_no_clusters(source):
    service = Service(cafe.create("tent", source.classifier), Settings(step_images=16), None)
    service.answer(noisy(4), ["a"] * 4, [True] * 4)
    status = service.status()
    assert status["clusters"] is None and status["cameras"][0]["clusters"] is None


def test_a_refused_step_leaves_the_clusters_as_they_were(serve):
    service = serve()
    send(service, 2)
    before, memory = published(service), service._adaptation.adapter.state()
    service._adaptation.judge.worse = lambda ours, theirs, than: "it was told to be worse"
    service._adaptation._got_worse = lambda validation, ours: ""
    status = send(service, 2, start=2)
    assert status["steps"]["refused"] > 0 and published(service) == before
    for name, tensor in service._adaptation.adapter.state().items():
        assert torch.equal(tensor, memory[name]), name


def test_rolling_back_brings_the_clusters_of_that_version_back(serve):
    service = serve(judge=False)
    counts = {}
    for seed in range(4):
        counts[send(service, 1, start=seed)["version"]] = published(service)
    first = min(version for version in counts if version)
    assert counts[first] != published(service)
    service.rollback(first)
    assert published(service) == counts[first]
    assert all(camera["clusters"] == [] for camera in service.status()["cameras"])  # other numbers, perhaps
    replica = Replica(service._adaptation.adapter)
    assert replica.clusters == {} and replica(noisy(3)).clusters == [-1] * 3
