"""The rivals against independent computations of their steps: plain networks in float64, plain torch, loops.

The reference shares no code with the library. Where a method is random, the test gives it a randomness of its own.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cafe_tta as cafe


@pytest.fixture(scope="module", params=["batchnorm", "groupnorm"])
def sharp(request, make_network):
    """A classifier with predictions from certain to uncertain, two batches for it, and its source images."""
    torch.manual_seed(3)
    network = make_network(batchnorm=request.param == "batchnorm")
    images = torch.randn(96, 3, 10, 10)
    network.train()
    with torch.no_grad():
        for _ in range(20):
            network(images)
        for layer in network:
            if isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm)):
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.3)
    network.double().eval()
    shifted = (images * torch.linspace(0.4, 1.9, 96)[:, None, None, None] + 0.3).double()
    with torch.no_grad():
        features = network[:-1](shifted)
        network[-1].bias.copy_(-network[-1].weight @ features.mean(0))
        scale = 1 / network(shifted).std(0).mean()
        network[-1].weight.mul_(1.8 * scale)
        network[-1].bias.mul_(1.8 * scale)
    classifier = cafe.split_classifier(network)
    return SimpleNamespace(
        classifier=classifier,
        batches=[shifted[:72:3], shifted[1:73:3]],
        images=images.double(),
        batchnorm=request.param == "batchnorm",
    )


class Plain:
    """The same network by itself: BatchNorm normalises with the batch, only normalisation layers move."""

    def __init__(self, classifier):
        network = copy.deepcopy(classifier.backbone.model)
        network[-1] = copy.deepcopy(classifier.head)
        self.network = network.eval().requires_grad_(True)
        norms = [layer for layer in self.network if isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm))]
        for layer in norms:
            layer.train()
            if isinstance(layer, nn.BatchNorm2d):
                layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
        self.moving = [p for layer in norms for p in (layer.weight, layer.bias)]
        self.start = [p.detach().clone() for p in self.moving]
        self.memory = [torch.zeros_like(p) for p in self.moving]
        self.squares = [torch.zeros_like(p) for p in self.moving]
        self.steps = 0

    def __call__(self, images):
        return self.network(images)

    def gradients(self, loss):
        return torch.autograd.grad(loss, self.moving)

    def sgd(self, gradients, lr, momentum=0.9, nesterov=False):
        with torch.no_grad():
            for p, v, g in zip(self.moving, self.memory, gradients, strict=True):
                v.mul_(momentum).add_(g)
                p.sub_(lr * (g + momentum * v if nesterov else v))

    def adam(self, gradients, lr):
        self.steps += 1
        with torch.no_grad():
            for p, m, v, g in zip(self.moving, self.memory, self.squares, gradients, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                p.sub_(lr * (m / (1 - 0.9**self.steps)) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8))


def assert_same(adapter, plain, start=None):
    """All that moves agrees, and has moved."""
    ours = [p.detach() for p in adapter.moving()]
    torch.testing.assert_close(ours, [p.detach() for p in plain.moving], rtol=1e-8, atol=1e-11)
    assert all(not torch.equal(p, s) for p, s in zip(ours, start or plain.start, strict=True))


def entropies(logits):
    rows = []
    for row in logits:
        p = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum()
        rows.append(-sum(q * torch.log(q) for q in p))
    return torch.stack(rows)


def cosine(a, b):
    return float((a @ b) / (a.norm() * b.norm()))


def eta_loss(plain, logits, mean, threshold, epsilon):
    """ETA's loss by loops; the new running mean; the images it is made of."""
    h, p = entropies(logits), logits.detach().softmax(1)
    chosen = [i for i in range(len(h)) if h[i] < threshold and (mean is None or abs(cosine(mean, p[i])) < epsilon)]
    loss = sum(math.exp(threshold - h[i].item()) * h[i] for i in chosen) / len(chosen)
    new = sum(p[i] for i in chosen) / len(chosen)
    return loss, new if mean is None else 0.9 * mean + 0.1 * new, chosen


def test_eta(sharp):
    adapter = cafe.create("eta", sharp.classifier, max_entropy=0.7, max_similarity=0.7, margin=0.7, lr=0.05)
    plain, mean, threshold = Plain(sharp.classifier), None, 0.7 * math.log(4)
    for images in sharp.batches:
        answer = adapter(images)
        logits = plain(images)
        torch.testing.assert_close(answer, logits.detach())
        loss, mean, chosen = eta_loss(plain, logits, mean, threshold, 0.7)
        assert adapter.report.notes["selected"] == len(chosen) < 24
        assert adapter.report.loss == pytest.approx(loss.item())
        plain.sgd(plain.gradients(loss), 0.05)
    assert adapter.report.notes["selected"] < adapter.report.notes["passed"]  # some were redundant
    assert_same(adapter, plain)
    torch.testing.assert_close(adapter.mean_prediction, mean)


def test_eata_pulls_the_weights_back(sharp):
    source = cafe.FisherInformation.fit(sharp.classifier, [sharp.images], batch_size=48)
    options = {"max_entropy": 0.7, "max_similarity": 0.7, "margin": 0.7, "lr": 0.01}
    adapter = cafe.create("eata", sharp.classifier, source, penalty=300.0, **options)
    plain, mean, threshold = Plain(sharp.classifier), None, 0.7 * math.log(4)
    fisher = [torch.zeros_like(p) for p in plain.moving]
    for part in sharp.images.split(48):
        logits = plain(part)
        for total, g in zip(fisher, plain.gradients(F.cross_entropy(logits, logits.argmax(1))), strict=True):
            total += g**2 / 2
    for images in sharp.batches:
        adapter(images)
        loss, mean, _ = eta_loss(plain, plain(images), mean, threshold, 0.7)
        moved = [p.detach() - s for p, s in zip(plain.moving, plain.start, strict=True)]
        pull = [2 * 300.0 * f.float() * way for f, way in zip(fisher, moved, strict=True)]
        plain.sgd([g + q for g, q in zip(plain.gradients(loss), pull, strict=True)], 0.01)
    assert_same(adapter, plain)
    assert adapter.report.notes["penalty"] > 0


def test_fisher_information_is_saved_and_belongs_to_its_classifier(sharp, source, tmp_path):
    made = cafe.FisherInformation.fit(sharp.classifier, [(sharp.images, None)])
    made.save(tmp_path / "fisher.safetensors")
    again = cafe.source.load(tmp_path / "fisher.safetensors")
    assert made.batches == again.batches == 2
    assert made.fisher.keys() == again.fisher.keys() and len(made.fisher) == 4
    assert all(torch.equal(made.fisher[name], again.fisher[name]) for name in made.fisher)
    with pytest.raises(ValueError, match="Fisher information do not belong to this classifier"):
        cafe.create("eata", source.classifier, again)
    with pytest.raises(ValueError, match="eata needs fisher from the source domain, but got none; make it with"):
        cafe.create("eata", sharp.classifier)
    with pytest.raises(ValueError, match="expected parameters='norm' for eata"):
        cafe.create("eata", sharp.classifier, made, parameters="all")
    with pytest.raises(ValueError, match="this classifier has none"):
        cafe.FisherInformation.fit(cafe.split_classifier(nn.Sequential(nn.Flatten(), nn.Linear(3, 2))), [])
    assert not any(p.requires_grad != q.requires_grad for p, q in zip(
        sharp.classifier.parameters(), copy.deepcopy(sharp.classifier).parameters(), strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("eta", {"max_entropy": 1e-6}, "no image passes the entropy filter (max_entropy=1e-06)"),
        ("sar", {"max_entropy": 1e-6}, "no image passes the entropy filter"),
        ("deyo", {"max_entropy": 1e-6}, "no image passes the entropy filter"),
        ("deyo", {"min_drop": 1.0}, "no certain image loses enough when its shape is destroyed (min_drop=1)"),
        ("cafe", {"max_entropy": 1e-6}, "no image passes the entropy filter"),
        ("tent", {"max_entropy": 1e-6}, "no image passes the entropy filter"),
    ],
)
def test_nothing_to_learn_is_answered_without_a_step(name, options, reason, sharp):
    stats = cafe.FeatureStats.fit(sharp.classifier, [sharp.images]).group(num_groups=2)
    adapter = cafe.create(name, sharp.classifier, stats, **options)
    before = {key: tensor.clone() for key, tensor in adapter.state().items() if "running" not in key}
    logits = adapter(sharp.batches[0])
    assert torch.isfinite(logits).all() and reason in adapter.report.reason
    assert not adapter.report.stepped and not adapter.report.refused and adapter.counters.steps == 0
    after = adapter.state()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items() if "num_batches" not in key)


def test_eta_takes_no_step_where_all_is_redundant(sharp):
    adapter = cafe.create("eta", sharp.classifier, max_entropy=1.0, max_similarity=1e-9)
    adapter(sharp.batches[0])  # without a mean, nothing is redundant
    mean, weights = adapter.mean_prediction.clone(), [p.clone() for p in adapter.moving()]
    adapter(sharp.batches[1])
    assert adapter.report.reason == "every image that is certain is like those before (max_similarity=1e-09)"
    assert torch.equal(adapter.mean_prediction, mean)
    assert all(torch.equal(a, b) for a, b in zip(adapter.moving(), weights, strict=True))


def test_reset_every_begins_anew(sharp):
    """Answers after a reset are those of a fresh adapter, bit for bit; batches are still counted."""
    options = {"max_entropy": 1.0, "max_similarity": 1.0, "lr": 0.05}
    batches = [sharp.batches[i % 2] * (1 + 0.1 * i) for i in range(7)]
    adapter = cafe.create("rdumb", sharp.classifier, reset_every=3, **options)
    answers = [adapter(images) for images in batches]
    assert adapter.counters.batches == 7 and adapter.counters.steps == 7
    fresh = cafe.create("eta", sharp.classifier, **options)
    for start in (0, 3, 6):
        fresh.reset()
        for images, answer in zip(batches[start : start + 3], answers[start : start + 3], strict=True):
            assert torch.equal(fresh(images), answer)
    assert adapter.report.notes["reset"] == 1.0


def test_a_bad_batch_does_not_bring_the_reset_forward(sharp):
    adapter = cafe.create("infomax", sharp.classifier, reset_every=1, lr=0.1)
    adapter(sharp.batches[0])
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    with pytest.raises(ValueError, match="cannot read images"):
        adapter(sharp.batches[0].repeat_interleave(2, 1))
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter.state().items())


def sar_step(plain, images, threshold, radius, lr, mean):
    """One step of SAR by loops, with the running mean of the loss."""
    logits = plain(images)
    h = entropies(logits)
    first = [i for i in range(len(h)) if h[i] < threshold]
    g = plain.gradients(sum(h[i] for i in first) / len(first))
    length = math.sqrt(sum(float((part**2).sum()) for part in g))
    old = [p.detach().clone() for p in plain.moving]
    with torch.no_grad():
        for p, part in zip(plain.moving, g, strict=True):
            p.add_(radius * part / (length + 1e-12))
    h = entropies(plain(images))
    second = [i for i in first if h[i] < threshold]
    loss = sum(h[i] for i in second) / len(second)
    g = plain.gradients(loss)
    with torch.no_grad():
        for p, value in zip(plain.moving, old, strict=True):
            p.copy_(value)
    plain.sgd(g, lr)
    return logits.detach(), loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item(), len(first), len(second)


def test_sar(sharp):
    adapter = cafe.create("sar", sharp.classifier, max_entropy=0.7, radius=0.5, lr=0.05, reset_below=0.0)
    plain, mean = Plain(sharp.classifier), None
    for images in sharp.batches:
        answer = adapter(images)
        logits, mean, first, second = sar_step(plain, images, 0.7 * math.log(4), 0.5, 0.05, mean)
        torch.testing.assert_close(answer, logits)
        assert (adapter.report.notes["passed"], adapter.report.notes["selected"]) == (first, second)
    assert adapter.mean_loss.item() == pytest.approx(mean)
    assert_same(adapter, plain)


def test_sar_recovers_from_collapse(sharp):
    adapter = cafe.create("sar", sharp.classifier, max_entropy=0.7, reset_below=9.0, lr=0.05)
    adapter(sharp.batches[0])
    assert adapter.report.notes["recovered"] == 1.0 and adapter.report.stepped and adapter.counters.batches == 1
    fresh = cafe.create("sar", sharp.classifier, max_entropy=0.7, reset_below=9.0, lr=0.05)
    assert adapter.state().keys() == fresh.state().keys()  # no momentum is left
    assert all(torch.equal(tensor, fresh.state()[name]) for name, tensor in adapter.state().items())


def test_sar_with_its_published_errors(sharp):
    """Whatever the option says, 0.2 decides; after a recovery the mean and the momentum are those before it."""
    options = {"max_entropy": 1.0, "lr": 0.05, "quirks": "official"}
    adapter = cafe.create("sar", sharp.classifier, reset_below=9.0, **options)
    adapter(sharp.batches[0])
    assert adapter.mean_loss.item() > 0.2 and "recovered" not in adapter.report.notes
    adapter.mean_loss.fill_(-1.0)  # a collapse
    adapter(sharp.batches[1])
    assert adapter.report.notes["recovered"] == 1.0 and adapter.mean_loss.item() < 0.2
    start = Plain(sharp.classifier).start
    assert all(torch.equal(p, s) for p, s in zip(adapter.moving(), start, strict=True))
    momentum = [adapter.optimizer.state[p]["momentum_buffer"].clone() for p in adapter.moving()]
    assert all(v.abs().max() > 0 for v in momentum)
    adapter.config = cafe.SARConfig(**{**options, "max_entropy": 1e-6})
    adapter(sharp.batches[0])  # nothing passes: the momentum moves the weights on
    for p, s, v in zip(adapter.moving(), start, momentum, strict=True):
        torch.testing.assert_close(p.detach(), s - 0.05 * 0.9 * v)
    assert adapter.report.notes["drifted"] == 1.0


@pytest.mark.parametrize("name", ["sar", "deyo"])
def test_the_last_stage_stays_fixed(name):
    """By the names of torchvision and timm."""
    parts = {"bn1": nn.BatchNorm2d(3), "layer4": nn.Sequential(nn.BatchNorm2d(3)), "norm": nn.BatchNorm2d(3)}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for key, part in parts.items():
                self.add_module(key, part)
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(self.norm(self.layer4(self.bn1(x))).mean((2, 3)))

    classifier = cafe.split_classifier(Net())
    adapter = cafe.create(name, classifier)
    assert {id(p) for p in adapter.moving()} == {id(p) for p in adapter.classifier.backbone.model.bn1.parameters()}
    assert len(cafe.create(name, classifier, skip_last_stage=False).moving()) == 6


def test_deyo(sharp, monkeypatch):
    """With a shuffling of our own, images that lose enough by it are learnt from."""
    from cafe_tta.methods import deyo

    monkeypatch.setattr(deyo, "destroy_shape", lambda images, how, generator: images.flip(2) * 0.3)
    adapter = cafe.create("deyo", sharp.classifier, max_entropy=0.7, min_drop=0.4, lr=0.05)
    plain, threshold = Plain(sharp.classifier), 0.7 * math.log(4)
    for images in sharp.batches:
        answer = adapter(images)
        logits = plain(images)
        torch.testing.assert_close(answer, logits.detach())
        h, p = entropies(logits), logits.detach().softmax(1)
        certain = [i for i in range(len(h)) if h[i] < threshold]
        destroyed = plain(torch.stack([images[i].flip(1) * 0.3 for i in certain])).detach().softmax(1)
        terms = []
        for row, i in enumerate(certain):
            drop = float(p[i].max() - destroyed[row, p[i].argmax()])
            if drop > 0.4:
                terms.append((math.exp(0.4 * math.log(4) - h[i].item()) + math.exp(drop)) * h[i])
        assert 0 < adapter.report.notes["selected"] == len(terms) < len(certain)
        plain.sgd(plain.gradients(sum(terms) / len(terms)), 0.05)
    assert_same(adapter, plain)


@pytest.mark.parametrize("size", [8, 10])
def test_shapes_are_destroyed_and_nothing_else(size):
    from cafe_tta.methods.deyo import destroy_shape

    images = torch.rand(3, 2, size, size)
    generator = torch.Generator().manual_seed(0)
    covered = destroy_shape(images, "centre", generator)
    start, stop = size // 4, size // 4 + size // 2
    inside = covered[:, :, start:stop, start:stop]
    torch.testing.assert_close(inside, images.mean((2, 3), keepdim=True).expand_as(inside))
    covered[:, :, start:stop, start:stop] = images[:, :, start:stop, start:stop]
    assert torch.equal(covered, images)
    mixed = destroy_shape(images, "pixels", generator)
    assert torch.equal(mixed.flatten(2).sort(2).values, images.flatten(2).sort(2).values)
    order = [int((images[0, 0].flatten() == value).nonzero()) for value in mixed[0, 0].flatten()]
    assert torch.equal(images[2, 1].flatten()[order], mixed[2, 1].flatten())  # one order for all
    patches = destroy_shape(images, "patches", generator)
    assert patches.shape == images.shape and not torch.equal(patches, images)
    if size % 4 == 0:  # without resizing, every patch is one of the image's, and each image has an order of its own
        side = size // 4
        orders = []
        for before, after in zip(images, patches, strict=True):
            corners = [(row, column) for row in range(0, size, side) for column in range(0, size, side)]
            old, new = ([t[:, r : r + side, c : c + side] for r, c in corners] for t in (before, after))
            orders.append([next(j for j in range(16) if torch.equal(old[j], patch)) for patch in new])
        assert all(sorted(order) == list(range(16)) for order in orders) and orders[0] != orders[1]


def test_deyo_learns_nothing_from_what_has_no_shape():
    """A classifier of mean colours predicts the same of shuffled patches: it never steps, whatever the images."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.GroupNorm(1, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    adapter = cafe.create("deyo", cafe.split_classifier(network), max_entropy=1.0, min_drop=1e-4)
    for _ in range(3):
        adapter(torch.randn(16, 3, 8, 8))
    assert adapter.counters.steps == 0
    with pytest.raises(ValueError, match=r"of at least 4 × 4 pixels, whose shape can be destroyed, but got shape"):
        adapter(torch.randn(16, 3, 3, 8))


def test_deyo_with_batchnorm_learns_nothing_from_one_certain_image(sharp):
    if not sharp.batchnorm:
        return
    h = entropies(Plain(sharp.classifier)(sharp.batches[0])).detach().sort().values
    share = float((h[0] + h[1]) / 2) / math.log(4)
    adapter = cafe.create("deyo", sharp.classifier, max_entropy=share)
    adapter(sharp.batches[0])
    assert adapter.report.reason == "only 1 certain image, too few for BatchNorm to normalise its copy with"


def roid_weights(p, h, mean):
    """Certainty times diversity, by loops; None for images that are left out."""
    d = [1 - cosine(mean, row) for row in p]
    u = [-x.item() for x in h]
    d = [(x - min(d)) / (max(d) - min(d)) for x in d]
    u = [(x - min(u)) / (max(u) - min(u)) for x in u]
    return [math.exp(3 * a * b) if a >= sum(d) / len(d) else None for a, b in zip(d, u, strict=True)]


def slr(row):
    p = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum()
    return -sum(q * torch.log(q / (1 - q) + 1e-5) for q in (torch.clamp(p, max=0.99)))


def sce(a, b):
    pa, pb = a.softmax(0), b.softmax(0)
    return -0.5 * sum(pb * torch.log(pa)) - 0.5 * sum(pa * torch.log(pb))


def corrected_by_prior(logits, official):
    prior = logits.softmax(1).mean(0)
    s = max(1 / len(logits), 1 / logits.shape[1]) / float(prior.max())
    prior = (prior + s) / (1 + s * logits.shape[1])
    if official:
        return logits * prior
    scaled = logits.softmax(1) * prior
    return (scaled / scaled.sum(1, keepdim=True)).log()


def roid_step(plain, images, mean, size, augment):
    logits = plain(images)
    h, p = entropies(logits), logits.detach().softmax(1)
    weights = roid_weights(p, h, mean)
    chosen = [i for i, w in enumerate(weights) if w is not None]
    augmented = plain(augment(images[chosen]))
    loss = sum(weights[i] * (slr(logits[i]) + sce(augmented[row], logits[i])) for row, i in enumerate(chosen)) / size
    return logits.detach(), plain.gradients(loss), 0.9 * mean + 0.1 * p.mean(0)


@pytest.mark.parametrize("quirks", ["repaired", "official"])
def test_roid(sharp, monkeypatch, quirks):
    from cafe_tta.augmentation import Augmentation

    monkeypatch.setattr(Augmentation, "__call__", lambda self, images, generator: images.flip(3) * 0.8)
    adapter = cafe.create("roid", sharp.classifier, lr=0.02, nesterov=True, batch_size=50, quirks=quirks)
    plain, mean = Plain(sharp.classifier), torch.full((4,), 0.25, dtype=torch.float64)
    for images in sharp.batches:
        answer = adapter(images)
        size = 50 if quirks == "official" else 24
        logits, gradients, mean = roid_step(plain, images, mean, size, lambda x: x.flip(3) * 0.8)
        expected = corrected_by_prior(logits, quirks == "official")
        got = answer if quirks == "official" else answer.log_softmax(1)
        torch.testing.assert_close(got, expected)
        plain.sgd(gradients, 0.02, nesterov=True)
        with torch.no_grad():
            for p, s in zip(plain.moving, plain.start, strict=True):
                p.copy_(0.99 * p + 0.01 * s)
    torch.testing.assert_close(adapter.mean_prediction, mean)
    assert_same(adapter, plain)


def test_roid_takes_no_step_where_predictions_are_all_alike(sharp):
    adapter = cafe.create("roid", sharp.classifier, min_batch=1)
    image = sharp.batches[0][:1]
    for images in (image, image.repeat(5, 1, 1, 1)):
        assert torch.isfinite(adapter(images)).all() and not adapter.report.stepped
        assert "all alike" in adapter.report.reason and not adapter.report.refused


def test_come_forgets_the_length_of_the_logits():
    """Entropy over (b, u) with b = e / (Σ e + C), u = C / (Σ e + C); no gradient along the logits."""
    logits = (3 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_(True)
    e = logits.detach().exp()
    total = e.sum(1, keepdim=True) + 7
    mass = torch.cat([e / total, 7 / total], 1)
    found = cafe.losses.opinion_entropy(logits)
    torch.testing.assert_close(found.detach(), -(mass * mass.log()).sum(1))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert (gradient * logits).sum(1).abs().max() < 1e-12 and gradient.abs().max() > 1e-3
    huge = torch.full((2, 3), 1e4, requires_grad=True)
    for extreme in (huge, torch.zeros(2, 3, requires_grad=True)):
        value = cafe.losses.opinion_entropy(extreme)
        assert torch.isfinite(value).all()
        assert torch.isfinite(torch.autograd.grad(value.sum(), extreme)[0]).all()


@pytest.mark.parametrize("name", ["tent", "eta", "sar", "deyo"])
def test_come_is_an_option_of_the_entropy_methods(name, sharp):
    options = {"min_drop": -1.0} if name == "deyo" else {}
    plain, come = (
        cafe.create(name, sharp.classifier, max_entropy=1.0, entropy=kind, **options) for kind in ("softmax", "come")
    )
    for adapter in (plain, come):
        adapter(sharp.batches[0])
    assert come.report.stepped and come.report.loss != plain.report.loss
