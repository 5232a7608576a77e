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
    return ((a @ b) / (a.norm() * b.norm())).item()


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
    source = cafe.FisherInformation.fit(sharp.classifier, [sharp.images], batch_size=96)
    options = {"max_entropy": 0.7, "max_similarity": 0.7, "margin": 0.7, "lr": 0.01}
    adapter = cafe.create("eata", sharp.classifier, source, penalty=300.0, **options)
    plain, mean, threshold = Plain(sharp.classifier), None, 0.7 * math.log(4)
    fisher = [torch.zeros_like(p) for p in plain.moving]
    logits = plain(sharp.images)
    for total, g in zip(fisher, plain.gradients(F.cross_entropy(logits, logits.argmax(1))), strict=True):
        total += g**2
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


def test_fisher_information_is_a_mean_over_batches_of_a_sample(sharp):
    """Of images that are drawn at random; the classifier is left as it was."""
    from cafe_tta.source import value

    drawn = value.sampled([sharp.images[:50], (sharp.images[50:], None)], 20)
    rows = [next(i for i, image in enumerate(sharp.images) if torch.equal(image, one)) for one in drawn]
    assert len(set(rows)) == 20 and max(rows) > 50 > min(rows) and rows != sorted(rows)
    before = {name: tensor.clone() for name, tensor in sharp.classifier.state_dict().items()}
    made = cafe.FisherInformation.fit(sharp.classifier, [sharp.images], batch_size=10, limit=20)
    drawn = value.sampled([sharp.images], 20)
    parts = [cafe.FisherInformation.fit(sharp.classifier, [torch.stack(drawn[i : i + 10])]) for i in (0, 10)]
    assert made.batches == 2
    for name, found in made.fisher.items():
        torch.testing.assert_close(found, (parts[0].fisher[name] + parts[1].fisher[name]) / 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in sharp.classifier.state_dict().items())


@pytest.mark.filterwarnings("ignore:source images that are normalised:cafe_tta.SourceWarning")
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


# ROID's relatives, and methods without gradient steps


def test_cmf(sharp, monkeypatch):
    from cafe_tta.augmentation import Augmentation

    monkeypatch.setattr(Augmentation, "__call__", lambda self, images, generator: images.flip(3) * 0.8)
    adapter = cafe.create("cmf", sharp.classifier, lr=0.02, noise=100.0, source_share=0.1, keep=0.8)
    plain, mean = Plain(sharp.classifier), torch.full((4,), 0.25, dtype=torch.float64)
    hidden, v = [s.clone() for s in plain.start], 0.0
    q = 100.0 * 36 / 38400  # 36 weights and biases
    for images in sharp.batches:
        answer = adapter(images)
        logits, gradients, mean = roid_step(plain, images, mean, 24, lambda x: x.flip(3) * 0.8)
        torch.testing.assert_close(answer.log_softmax(1), corrected_by_prior(logits, False))
        plain.sgd(gradients, 0.02)
        hidden = [0.9 * h + 0.1 * s for h, s in zip(hidden, plain.start, strict=True)]
        v = 0.81 * v + q
        gain = max((1 - q) / (v + 1 - q), 0.89)
        v = gain * v
        assert adapter.report.notes["gain"] == pytest.approx(gain) and gain < 1
        with torch.no_grad():
            hidden = [gain * h + (1 - gain) * p for h, p in zip(hidden, plain.moving, strict=True)]
            for p, h in zip(plain.moving, hidden, strict=True):
                p.copy_(0.8 * p + 0.2 * h)
    assert_same(adapter, plain)
    torch.testing.assert_close(list(adapter.second().values()), [h.detach() for h in hidden])


@pytest.mark.parametrize(
    ("parameters", "gains", "limit"),
    [(17_952, (0.99766, 0.99539, 0.99318), 0.96115), (53_120, (0.99308, 0.98644, 0.98015), 0.9283)],
)
def test_gains_of_cmf_are_the_published_ones(parameters, gains, limit, monkeypatch, sharp):
    """Of a WRN-28-10 and a ResNet-50."""
    adapter = cafe.create("cmf", sharp.classifier)
    monkeypatch.setattr(adapter, "_step_noise", lambda: 0.005 * parameters / 38_400)
    found = []
    for _ in range(200):
        adapter.after_step()
        found.append(adapter.notes["gain"])
    assert found[:3] == pytest.approx(gains, abs=1e-5) and found[-1] == pytest.approx(limit, abs=2e-5)
    with pytest.raises(ValueError, match="cmf's filter needs q below 1, but 2000 for each 38400 parameters makes 1.88"):
        cafe.create("cmf", sharp.classifier, noise=2000.0)


def test_zerosiam(sharp):
    adapter = cafe.create("zerosiam", sharp.classifier, lr=0.02, predictor_lr=0.05)
    plain, w = Plain(sharp.classifier), torch.eye(12, dtype=torch.float64, requires_grad=True)
    plain.moving.append(w)
    plain.start.append(w.detach().clone())
    plain.memory.append(torch.zeros_like(w))
    for images in sharp.batches:
        answer = adapter(images)
        features = plain.network[:-1](images)
        head = plain.network[-1]
        fixed = head(features).detach()
        torch.testing.assert_close(answer, fixed)
        total = 0
        for f, z in zip(features, fixed, strict=True):
            r, o = z.softmax(0), (head.weight @ (w @ f) + head.bias).softmax(0)
            total = total - sum(o * o.log()) + sum(r * (r / o).log()) + sum(o * (o / r).log())
        gradients = plain.gradients(total / len(images))
        gradients = [*(g * 0.02 for g in gradients[:-1]), gradients[-1] * 0.05]  # the rates, before the momentum
        plain.sgd(gradients, 1.0)
    assert_same(adapter, plain)


def test_zerosiam_begins_as_tent(sharp):
    """With the identity as predictor, both divergences have no gradient: the first step is Tent's."""
    ours = cafe.create("zerosiam", sharp.classifier, lr=0.02)
    tent = cafe.create("tent", sharp.classifier, lr=0.02, momentum=0.9)
    for adapter in (ours, tent):
        adapter(sharp.batches[0])
    torch.testing.assert_close(ours.moving()[:-1], tent.moving())


def mixture_by_loops(network, images, components, rate):
    """UnMix-TNS image by image: the answers, and the components after the batch."""
    answers, moves = [], [[] for _ in components]
    for image in images:
        x, number = image[None], 0
        for layer in network:
            if not isinstance(layer, nn.BatchNorm2d):
                x = layer(x)
                continue
            mu, var = components[number]
            m, s2 = x[0].mean((1, 2)), x[0].var((1, 2), correction=0)
            pi = torch.tensor([cosine(m, k) / 0.07 for k in mu], dtype=torch.float64).softmax(0)
            mus = [(1 - p) * k + p * m for p, k in zip(pi, mu, strict=True)]
            variances = [(1 - p) * v + p * s2 for p, v in zip(pi, var, strict=True)]
            mean = sum(mus) / len(mus)
            total = sum(variances) / len(mus) + sum(k**2 for k in mus) / len(mus) - mean**2
            shape = (1, -1, 1, 1)
            x = (x - mean.view(shape)) / (total.view(shape) + layer.eps).sqrt()
            x = x * layer.weight.view(shape) + layer.bias.view(shape)
            moves[number].append((pi, m, s2))
            number += 1
        answers.append(x[0])
    after = []
    for (mu, var), moved in zip(components, moves, strict=True):
        new_mu = [k + rate * sum(pi[j] * (m - k) for pi, m, _ in moved) / len(moved) for j, k in enumerate(mu)]
        new_var = [v + rate * sum(pi[j] * (s2 - v) for pi, _, s2 in moved) / len(moved) for j, v in enumerate(var)]
        after.append((torch.stack(new_mu), torch.stack(new_var)))
    return torch.stack(answers).detach(), [(a.detach(), b.detach()) for a, b in after]


def test_unmix_tns(sharp):
    if not sharp.batchnorm:
        with pytest.raises(ValueError, match="unmix-tns replaces the statistics of BatchNorm layers"):
            cafe.create("unmix-tns", sharp.classifier)
        with pytest.raises(ValueError, match="normalisation='unmix-tns' needs BatchNorm layers"):
            cafe.create("tent", sharp.classifier, normalisation="unmix-tns")
        return
    adapter = cafe.create("unmix-tns", sharp.classifier, components=3, batch_size=30)
    network = copy.deepcopy(sharp.classifier.backbone.model)
    network[-1] = sharp.classifier.head
    memory = adapter.normaliser.memory
    components = [(memory[f"means.{i}"].clone(), memory[f"vars.{i}"].clone()) for i in range(2)]
    for images in (sharp.batches[0], sharp.batches[1][:7]):  # the last one shorter
        rate = 1 - 0.9 ** (len(images) / 30)
        expected, components = mixture_by_loops(network.eval(), images, components, rate)
        torch.testing.assert_close(adapter(images), expected)
    memory = adapter.normaliser.memory
    for i, (means, variances) in enumerate(components):
        torch.testing.assert_close(memory[f"means.{i}"], means)
        torch.testing.assert_close(memory[f"vars.{i}"], variances)
    torch.testing.assert_close(adapter.predict(images), mixture_by_loops(network, images, components, 0.0)[0])


def test_components_have_the_variance_of_the_source_together(make_network):
    from cafe_tta.mixture import Mixture

    layer = nn.BatchNorm2d(2)
    layer.running_mean.copy_(torch.tensor([3.0, -1.0]))
    layer.running_var.copy_(torch.tensor([4.0, 0.25]))
    means, variances = Mixture([layer], 100_000, 64).memory.values()
    torch.testing.assert_close(means.mean(0), layer.running_mean.double(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(means.var(0) + variances.mean(0), layer.running_var.double(), rtol=0.02, atol=0)
    (means, variances) = Mixture([layer], 1, 64).memory.values()  # one component is the source
    torch.testing.assert_close([means[0], variances[0]], [layer.running_mean.double(), layer.running_var.double()])


def test_a_gradient_flows_through_the_statistics_of_an_image(sharp):
    """By finite differences, with the shares held fixed, as published."""
    from cafe_tta.mixture import Mixture

    torch.manual_seed(0)
    layer = nn.BatchNorm2d(2).double()
    mixture = Mixture([layer], 2, 64)
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    flat = Mixture([layer], 1, 64)  # with one component, its share is 1 whatever the image
    assert torch.autograd.gradcheck(lambda t: flat.normalised(layer, 0, t), x)
    (gradient,) = torch.autograd.grad(mixture.normalised(layer, 0, x)[0].square().sum(), x)
    assert gradient[0].abs().max() > 1e-3 and gradient[1].abs().max() == 0


def lame_by_loops(features, probabilities, kernel, rounds=300):
    y = probabilities.clone()
    for _ in range(rounds):
        y = torch.stack([
            (torch.log(probabilities[i] + 1e-10) + sum(kernel[i][j] * y[j] for j in range(len(y)))).softmax(0)
            for i in range(len(y))
        ])  # fmt: skip
    return y


@pytest.mark.parametrize("affinity", ["rbf", "knn", "linear"])
def test_lame(sharp, affinity):
    adapter = cafe.create("lame", sharp.classifier, affinity=affinity, neighbours=3, weight=0.3)
    images = sharp.batches[0][:8]
    features, logits = sharp.classifier.features_and_logits(images)
    f = [row / row.norm() for row in features.detach()]
    distance = [[float((a - b).norm()) for b in f] for a in f]
    if affinity == "rbf":
        sigma = sum(sorted(row)[2] for row in distance) / 8  # itself included
        kernel = [[0.3 * math.exp(-(d**2) / (2 * sigma**2)) for d in row] for row in distance]
    elif affinity == "knn":
        nearest = [sorted((d, j) for j, d in enumerate(row) if j != i)[:3] for i, row in enumerate(distance)]
        kernel = [[0.3 * any(j == other for _, other in row) for j in range(8)] for row in nearest]
    else:
        kernel = [[0.3 * float(a @ b) for b in f] for a in f]
    expected = lame_by_loops(f, logits.detach().softmax(1), kernel)
    torch.testing.assert_close(adapter(images).exp(), expected, rtol=1e-3, atol=1e-4)
    assert adapter.report.stepped and adapter.report.notes["iterations"] > 2
    assert torch.equal(adapter.predict(images), adapter(images))


def test_lame_leaves_what_has_no_neighbours(sharp):
    adapter = cafe.create("lame", sharp.classifier)
    image = sharp.batches[0][:1]
    torch.testing.assert_close(adapter(image), sharp.classifier(image).detach())
    assert adapter.report.reason == "a single image has no neighbours to agree with" and not adapter.report.stepped
    same = adapter(image.repeat(4, 1, 1, 1))
    assert torch.isfinite(same).all() and (same.argmax(1) == sharp.classifier(image).argmax()).all()
    free = cafe.create("lame", sharp.classifier, weight=0.0)
    expected = sharp.classifier(sharp.batches[0]).log_softmax(1).detach()
    torch.testing.assert_close(free(sharp.batches[0]), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_neo(sharp, momentum):
    adapter = cafe.create("neo", sharp.classifier, momentum=momentum)
    first, second = sharp.batches[0], sharp.batches[1][:6]
    features = [sharp.classifier.backbone(images).detach() for images in (first, second)]
    means = [features[0].mean(0), torch.cat(features).mean(0)]
    if momentum is not None:
        means[1] = 0.7 * means[0] + 0.3 * features[1].mean(0)
    head = sharp.classifier.head
    for images, f, mean in zip((first, second), features, means, strict=True):
        torch.testing.assert_close(adapter(images), ((f - mean) @ head.weight.T + head.bias).detach())
    torch.testing.assert_close(adapter.predict(first), ((features[0] - means[1]) @ head.weight.T + head.bias).detach())
    adapter.reset()
    torch.testing.assert_close(adapter(first[:1]), sharp.classifier(first[:1]).detach())  # its mean is itself


# Teachers


def all_weights(classifier):
    """A plain network whose every weight moves."""
    plain = Plain(classifier)
    plain.moving = list(plain.network.parameters())
    plain.start = [p.detach().clone() for p in plain.moving]
    plain.memory = [torch.zeros_like(p) for p in plain.moving]
    return plain


def evaluated(plain, weights, images):
    """Logits with other weights in the plain network."""
    own = [p.detach().clone() for p in plain.moving]
    with torch.no_grad():
        for p, w in zip(plain.moving, weights, strict=True):
            p.copy_(w)
        logits = plain(images)
        for p, w in zip(plain.moving, own, strict=True):
            p.copy_(w)
    return logits


@pytest.mark.parametrize(("confidence", "symmetric"), [(0.0, False), (1.01, False), (1.01, True)])
def test_cotta(sharp, monkeypatch, confidence, symmetric):
    from cafe_tta.augmentation import Augmentation

    seeds = []

    def augment(self, images, generator):
        seeds.append(generator.initial_seed())
        return images * (1 + 0.1 * (generator.initial_seed() % 1000))

    monkeypatch.setattr(Augmentation, "__call__", augment)
    options = {"restore": 0.0, "keep": 0.9, "min_confidence": confidence, "augmentations": 3, "symmetric": symmetric}
    adapter = cafe.create("cotta", sharp.classifier, lr=0.01, **options)
    plain = all_weights(sharp.classifier)
    teacher = [s.clone() for s in plain.start]
    for images in sharp.batches:
        answer = adapter(images)
        if confidence:
            taught = sum(evaluated(plain, teacher, images * (1 + 0.1 * i)) for i in range(3)) / 3
        else:
            taught = evaluated(plain, teacher, images)
        torch.testing.assert_close(answer, taught)
        logits = plain(images)
        pairs = list(zip(taught.softmax(1), logits, strict=True))
        loss = sum(-sum(t * z.log_softmax(0)) for t, z in pairs) / len(images)
        if symmetric:
            loss = (loss + sum(-sum(z.softmax(0) * t.log()) for t, z in pairs) / len(images)) / 2
        plain.sgd(plain.gradients(loss), 0.01)
        teacher = [0.9 * t + 0.1 * p.detach() for t, p in zip(teacher, plain.moving, strict=True)]
    assert seeds == ([0, 1, 2, 1000, 1001, 1002] if confidence else [])
    ours = dict(adapter.classifier.named_parameters())
    theirs = [*(ours[f"backbone.model.{name}"] for name, _ in plain.network[:-1].named_parameters())]
    theirs += [ours["head.weight"], ours["head.bias"]]
    torch.testing.assert_close([p.detach() for p in theirs], [p.detach() for p in plain.moving])
    assert not torch.equal(theirs[0], plain.start[0])
    if not sharp.batchnorm:  # whose evaluation mode has statistics of its own
        torch.testing.assert_close(adapter.predict(images), evaluated(plain, teacher, images))


def test_cotta_evaluates_as_its_teacher_answers(sharp):
    """With the teacher's weights and the statistics of the batch; a single image with those of the source."""
    adapter = cafe.create("cotta", sharp.classifier, lr=0.1, augmentations=1, min_confidence=0.0)
    before = {name: tensor.clone() for name, tensor in adapter.classifier.state_dict().items() if "running" in name}
    for _ in range(3):
        adapter(sharp.images)
    assert all(torch.equal(tensor, adapter.classifier.state_dict()[name]) for name, tensor in before.items())
    evaluated = adapter.predict(sharp.images)
    assert torch.allclose(evaluated, adapter(sharp.images), atol=1e-5)  # answers with the teacher before its step
    assert torch.isfinite(adapter.predict(sharp.images[:1])).all()


def test_cotta_restores_at_random(sharp):
    same = cafe.create("cotta", sharp.classifier, restore=1.0, lr=0.1, augmentations=1)
    same(sharp.batches[0])
    assert same.report.stepped
    start = dict(sharp.classifier.named_parameters())
    assert all(torch.equal(p, start[name]) for name, p in same.classifier.named_parameters())
    some = cafe.create("cotta", sharp.classifier, restore=0.3, lr=0.1, augmentations=1)
    some(sharp.batches[0])
    back = torch.cat([(p == start[name]).flatten() for name, p in some.classifier.named_parameters()]).double()
    assert back.mean().item() == pytest.approx(0.3, abs=0.05)
    with pytest.raises(ValueError, match="cotta answers with its teacher as it is before a step"):
        cafe.CoTTAConfig(answer="after")


def slow_pass(network, images, stats, alpha=None):
    """A pass with slow statistics: with alpha, they first follow the batch. Logits, and the new statistics."""
    new, x, number = [], images, 0
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            mean, var = stats[number]
            if alpha is not None:
                mean = (1 - alpha) * mean + alpha * x.mean((0, 2, 3))
                var = (1 - alpha) * var + alpha * x.var((0, 2, 3), correction=0)
            new.append((mean.detach(), var.detach()))
            shape = (1, -1, 1, 1)
            x = (x - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()
            x = x * layer.weight.view(shape) + layer.bias.view(shape)
            number += 1
        else:
            x = layer(x)
    return x, new


def remembered_by_loops(bank, capacity, classes, image, label, entropy):
    """RoTTA's memory as plain lists of [image, label, entropy, age]."""

    def score(item):
        return 1 / (1 + math.exp(-item[3] / capacity)) + item[2] / math.log(classes)

    new = [image, label, entropy, 0]
    sizes = [sum(item[1] == k for item in bank) for k in range(classes)]
    if sizes[label] < capacity / classes and len(bank) < capacity:
        bank.append(new)
    else:
        if sizes[label] < capacity / classes:
            candidates = [item for item in bank if sizes[item[1]] == max(sizes)]
        else:
            candidates = [item for item in bank if item[1] == label]
        worst = candidates[0]
        for item in candidates[1:]:
            if score(item) >= score(worst):
                worst = item
        if score(worst) > score(new):
            bank[:] = [item for item in bank if item is not worst]
            bank.append(new)
    for item in bank:
        item[3] += 1


def test_rotta(sharp, monkeypatch):
    from cafe_tta.augmentation import Augmentation

    monkeypatch.setattr(Augmentation, "__call__", lambda self, images, generator: images.flip(3) * 0.9)
    adapter = cafe.create("rotta", sharp.classifier, lr=0.02, capacity=8, keep=0.7, optimizer="sgd", slow=0.2)
    student = Plain(sharp.classifier)
    teacher = [s.clone() for s in student.start]
    layers = [layer for layer in sharp.classifier.backbone.model if isinstance(layer, nn.BatchNorm2d)]
    stats = [(layer.running_mean, layer.running_var) for layer in layers]
    stats = {"student": stats, "teacher": stats}
    bank, count, steps = [], 0, 0

    def with_teacher(images, alpha):
        own = [p.detach().clone() for p in student.moving]
        with torch.no_grad():
            for p, t in zip(student.moving, teacher, strict=True):
                p.copy_(t)
            made = slow_pass(student.network, images, stats["teacher"], alpha)
            for p, t in zip(student.moving, own, strict=True):
                p.copy_(t)
        return made

    for images in sharp.batches:
        answer = adapter(images)
        logits, _ = with_teacher(images, None)
        torch.testing.assert_close(answer, logits)
        for image, z in zip(images, logits, strict=True):
            p = z.softmax(0)
            remembered_by_loops(bank, 8, 4, image, int(p.argmax()), -float(sum(p * (p + 1e-6).log())))
            count += 1
            if count % 8 == 0:
                memory = torch.stack([item[0] for item in bank])
                taught, stats["teacher"] = with_teacher(memory, 0.2)
                found, stats["student"] = slow_pass(student.network, memory.flip(3) * 0.9, stats["student"], 0.2)
                terms = []
                for item, t, s in zip(bank, taught.softmax(1), found, strict=True):
                    weight = math.exp(-item[3] / 8) / (1 + math.exp(-item[3] / 8))
                    terms.append(-weight * sum(t * s.log_softmax(0)))
                student.sgd(student.gradients(sum(terms) / len(terms)), 0.02)
                teacher = [0.7 * t + 0.3 * p.detach() for t, p in zip(teacher, student.moving, strict=True)]
                steps += 1
        assert adapter.report.stepped
    assert steps == 6 and adapter.report.notes["remembered"] == len(bank)
    assert_same(adapter, student)
    second = adapter.second()
    weights = [second[name] for name, p in adapter.classifier.named_parameters() if p.requires_grad]
    torch.testing.assert_close(weights, teacher)
    found = [second[name] for name in second if "running_mean" in name]
    torch.testing.assert_close(found, [mean for mean, _ in stats["teacher"]])


@pytest.mark.parametrize(("capacity", "classes"), [(8, 4), (7, 3), (6, 20)])
def test_the_memory_is_balanced(capacity, classes):
    from cafe_tta.methods.balanced import BalancedMemory

    generator = torch.Generator().manual_seed(capacity)
    memory, bank = BalancedMemory(capacity, classes), []
    for number in range(200):
        label = int(torch.randint(0, classes, (), generator=generator) ** 2 // classes)  # some are rare
        entropy = float(torch.rand((), generator=generator)) * math.log(classes)
        image = torch.tensor([float(number)])
        memory.add(image, label, entropy)
        remembered_by_loops(bank, capacity, classes, image, label, entropy)
        assert [(int(i), *rest) for i, *rest in memory.items] == [(int(i), *rest) for i, *rest in bank]
        assert len(bank) <= capacity
        most = max(sum(item[1] == k for item in memory.items) for k in range(classes))
        assert most <= math.ceil(capacity / classes)


def test_rotta_answers_each_image_by_itself_and_refuses_what_does_not_fit(sharp):
    adapter = cafe.create("rotta", sharp.classifier, capacity=16)
    adapter(sharp.batches[0])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(adapter.predict(sharp.batches[1])[order], adapter.predict(sharp.batches[1][order]))
    adapter(sharp.batches[1][:1])  # a single image
    assert adapter.report.reason == "a step is taken after each 16 images"
    with pytest.raises(ValueError, match=r"rotta remembers images of shape \(3, 10, 10\), but got \(3, 12, 12\)"):
        adapter(torch.rand(2, 3, 12, 12, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected normalisation='slow', but got 'batch'"):
        cafe.RoTTAConfig(normalisation="batch")


# Alignment with the source


def outputs_of_norms(network, images):
    found, x = [], images
    for layer in network:
        x = layer(x)
        if isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm)):
            found.append(x)
    return found, x


def source_network(classifier):
    """The plain network in evaluation mode: BatchNorm has the source's statistics, every weight moves."""
    plain = all_weights(classifier)
    network = copy.deepcopy(classifier.backbone.model)
    network[-1] = copy.deepcopy(classifier.head)
    plain.network = network.eval().requires_grad_(True)
    plain.moving = list(network.parameters())
    return plain


def test_actmad(sharp):
    source = cafe.ActivationStats.fit(sharp.classifier, [(sharp.images, None)], batch_size=48)
    adapter = cafe.create("actmad", sharp.classifier, source, lr=0.01)
    plain = source_network(sharp.classifier)
    targets = []
    for number in range(2):
        parts = [outputs_of_norms(plain.network, part)[0][number].detach() for part in sharp.images.split(48)]
        targets.append((sum(p.mean(0) for p in parts) / 2, sum(p.var(0) for p in parts) / 2))
    for images in sharp.batches:
        answer = adapter(images)
        outputs, logits = outputs_of_norms(plain.network, images)
        torch.testing.assert_close(answer, logits.detach())
        loss = 0
        for (mean, var), output in zip(targets, outputs, strict=True):
            m = sum(output) / len(output)
            v = sum((o - m) ** 2 for o in output) / (len(output) - 1)
            loss = loss + (m - mean.float()).abs().mean() / 2 + (v - var.float()).abs().mean() / 2
        gradients = torch.autograd.grad(loss, plain.moving, allow_unused=True)  # the head has weight decay alone
        decayed = [
            (torch.zeros_like(p) if g is None else g) + 5e-4 * p.detach() * (g is not None)
            for p, g in zip(plain.moving, gradients, strict=True)
        ]
        plain.sgd(decayed, 0.01, nesterov=True)
        assert adapter.report.loss == pytest.approx(loss.item())
    ours = dict(adapter.classifier.named_parameters())
    theirs = [ours[f"backbone.model.{name}"] for name, _ in plain.network[:-1].named_parameters()]
    expected = [p.detach() for p in plain.network[:-1].parameters()]
    torch.testing.assert_close([p.detach() for p in theirs], expected, rtol=1e-6, atol=1e-8)
    assert not torch.equal(theirs[0], plain.start[0])


def test_actmad_has_nothing_to_do_on_the_source_itself(sharp):
    source = cafe.ActivationStats.fit(sharp.classifier, [sharp.images[:24]])
    adapter = cafe.create("actmad", sharp.classifier, source)
    adapter(sharp.images[:24])
    here = adapter.report.loss
    adapter.reset()
    adapter(sharp.images[:24].flip(3))  # the same pixels elsewhere
    assert here < 1e-6 < adapter.report.loss
    adapter(sharp.images[:1])
    assert adapter.report.reason == "a single image has no variance to compare with the source's"
    with pytest.raises(ValueError, match=r"shape \(6, 4, 4\) in normalisation layer 0, but got \(6, 5, 5\); resize"):
        adapter(torch.rand(2, 3, 12, 12, dtype=torch.float64))


def test_activation_statistics_and_class_moments_are_saved(sharp, tmp_path):
    names = {
        cafe.ActivationStats: ("means", "variances"),
        cafe.ClassMoments: ("mean", "cov", "class_counts", "class_mean", "class_cov"),
    }
    for number, kind in enumerate(names):
        made = kind.fit(sharp.classifier, [sharp.images])
        made.save(tmp_path / f"{number}.safetensors")
        again = cafe.source.load(tmp_path / f"{number}.safetensors")
        assert type(again) is kind
        again.check_belongs_to(sharp.classifier)
        for name in names[kind]:
            pairs = zip(getattr(made, name), getattr(again, name), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match="expected at least 2 source images"):
        cafe.ActivationStats.fit(sharp.classifier, [])
    with pytest.raises(ValueError, match="expected at least 2 source images, but the loader has 0"):
        cafe.ClassMoments.fit(sharp.classifier, [])


@pytest.mark.parametrize("full", [True, False])
def test_class_moments_are_those_of_the_predicted_classes(sharp, full):
    source = cafe.ClassMoments.fit(sharp.classifier, sharp.images.split(40), full=full)
    features, logits = (t.detach() for t in sharp.classifier.features_and_logits(sharp.images))
    torch.testing.assert_close(source.cov, torch.cov(features.T, correction=0).float(), rtol=1e-4, atol=1e-6)
    for label in range(4):
        own = features[logits.argmax(1) == label]
        assert source.class_counts[label] == len(own)
        if len(own) > 1:
            cov = torch.cov(own.T, correction=0).float()
            torch.testing.assert_close(source.class_mean[label], own.mean(0).float())
            torch.testing.assert_close(source.class_cov[label], cov if full else cov.diagonal(), rtol=1e-3, atol=1e-6)


def symmetric_kl(m0, c0, m1, c1):
    p, q = (torch.distributions.MultivariateNormal(m, c) for m, c in ((m0, c0), (m1, c1)))
    return torch.distributions.kl_divergence(p, q) + torch.distributions.kl_divergence(q, p)


def follow(rows, mean, cov, seen, window):
    """Running moments by loops over the images."""
    a = 1 / len(rows) if len(rows) > window else max(1 / seen, 1 / window)
    step = a * sum(row - mean for row in rows)
    new = cov + a * sum(torch.outer(row - mean, row - mean) - cov for row in rows) - torch.outer(step, step)
    return mean + step, new


@pytest.mark.parametrize("classes", ["as-source", "diagonal"])
def test_ttac(sharp, classes):
    source = cafe.ClassMoments.fit(sharp.classifier, [sharp.images])
    options = {"min_confidence": 0.5, "min_images": 4, "window": 30, "class_window": 10, "scale": 0.3}
    adapter = cafe.create(
        "ttac", sharp.classifier, source, lr=0.002, answer="before", class_covariance=classes, **options
    ).double()
    plain = Plain(sharp.classifier)
    plain.moving = list(plain.network[:-1].parameters())
    plain.memory = [torch.zeros_like(p) for p in plain.moving]
    eye, zeros = torch.eye(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)

    def only(cov):
        return torch.diag(torch.diagonal(cov)) if classes == "diagonal" else cov

    target, seen = (zeros, 0 * eye), 0
    own = {k: (zeros, 0 * eye, 0) for k in range(4)}
    aligned = []
    for images in sharp.batches:
        adapter(images)
        features = plain.network[:-1](images)
        probs = plain.network[-1](features).detach().softmax(1)
        seen += len(images)
        target = follow(features, *target, seen, 30)
        ridge = source.cov.double().max() / 30 * eye
        loss = 0.3 * symmetric_kl(source.mean.double(), source.cov.double() + ridge, target[0], target[1] + ridge)
        target, count = (target[0].detach(), target[1].detach()), 0
        for k in range(4):
            rows = [f for f, p in zip(features, probs, strict=True) if p.argmax() == k and p.max() > 0.5]
            if not rows:
                continue
            mean, cov, number = own[k]
            mean, cov = follow(rows, mean, cov, number + len(rows), 10)
            own[k] = (mean.detach(), cov.detach(), number + len(rows))
            if number + len(rows) >= 4:
                c = only(source.class_cov[k].double())
                ridge = c.max() / 30 * eye
                loss = loss + 0.3 / 4 * symmetric_kl(source.class_mean[k].double(), c + ridge, mean, only(cov) + ridge)
                count += 1
        aligned.append(count)
        assert adapter.report.notes["classes"] == count
        assert adapter.report.loss == pytest.approx(loss.item(), rel=1e-6)
        plain.sgd(plain.gradients(loss), 0.002)
    assert sum(aligned) > 2
    ours = dict(adapter.classifier.backbone.model.named_parameters())
    theirs = [ours[name].detach() for name, _ in plain.network[:-1].named_parameters()]
    torch.testing.assert_close(theirs, [p.detach() for p in plain.moving], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(adapter.target_cov, target[1], rtol=1e-6, atol=1e-9)


def test_ttac_answers_after_the_step_and_finds_nothing_wrong_with_the_source(sharp):
    source = cafe.ClassMoments.fit(sharp.classifier, [sharp.images])
    adapter = cafe.create("ttac", sharp.classifier, source, normalisation="source", window=96)
    answer = adapter(sharp.images)
    assert adapter.report.notes["divergence"] < 1e-6
    torch.testing.assert_close(answer, adapter.predict(sharp.images))


# Experts


class Tokens(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def routed_pass(network, images, experts):
    """Image by image; `experts` has (router weight, router bias, weights, biases) for each layer but the first."""
    norms = [layer for layer in network if isinstance(layer, (nn.LayerNorm, nn.GroupNorm))]
    logits, routing = [], [[] for _ in experts]
    for image in images:
        x = image[None]
        for layer in network:
            before, x = x, layer(x)
            if layer in norms[1:]:
                number = norms.index(layer) - 1
                r, s, w, b = experts[number]
                group = isinstance(layer, nn.GroupNorm)
                centre = before[0].mean((1, 2)) if group else before[0].mean(0)
                share = (r @ centre + s).softmax(0)
                e = int(share.argmax())
                gate = share[e] / share[e].item()
                shape = (-1, 1, 1) if group else (-1,)
                plain = (x - layer.bias.view(shape)) / layer.weight.view(shape)
                x = x + gate * (plain * w[e].view(shape) + b[e].view(shape))
                routing[number].append(share)
        logits.append(x[0])
    return torch.stack(logits), [torch.stack(shares) for shares in routing]


@pytest.mark.parametrize("kind", ["groupnorm", "layernorm"])
def test_moetta(kind, make_network):
    torch.manual_seed(1)
    if kind == "groupnorm":
        network = make_network(batchnorm=False)
    else:
        network = nn.Sequential(
            Tokens(), nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.ReLU(),
            nn.Linear(6, 5), nn.LayerNorm(5), Mean(), nn.Linear(5, 4),
        )  # fmt: skip
    for layer in network:
        if isinstance(layer, (nn.LayerNorm, nn.GroupNorm)):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.3)
    classifier = cafe.split_classifier(network.double().eval())
    adapter = cafe.create("moetta", classifier, experts=3, lr=0.5, momentum=0.9, seed=4)
    images = [torch.randn(10, 3, 10, 10, dtype=torch.float64) * 2 for _ in range(2)]
    experts = [
        [p.detach().clone().requires_grad_(True) for p in (r.router.weight, r.router.bias, r.weight, r.bias)]
        for r in adapter.routed
    ]
    moving = [p for expert in experts for p in expert]
    start, memory = [p.detach().clone() for p in moving], [torch.zeros_like(p) for p in moving]
    assert all((expert[2] == 0).all() and (expert[1] == 0).all() for expert in experts)
    means = []
    for batch in images:
        answer = adapter(batch)
        logits, routing = routed_pass(network, batch, experts)
        torch.testing.assert_close(answer, logits.detach())
        h = entropies(logits)
        means.append(h.mean().item())
        mean = sum(means) / len(means)
        chosen = [x for x in h if x.item() <= mean]
        assert 0 < len(chosen) == adapter.report.notes["selected"] < 10
        loss = sum(math.exp(0.4 * math.log(4) - x.item()) * x for x in chosen) / len(chosen)
        for shares in routing:
            taken = [sum(int(row.argmax()) == e for row in shares) / 10 for e in range(3)]
            loss = loss + 0.2 * mean * 3 * sum(shares[:, e].mean() * taken[e] for e in range(3))
        assert adapter.report.loss == pytest.approx(loss.item())
        for p, v, g in zip(moving, memory, torch.autograd.grad(loss, moving), strict=True):
            v.mul_(0.9).add_(g)
            with torch.no_grad():
                p.sub_(0.5 * v)
    ours = [p.detach() for r in adapter.routed for p in (r.router.weight, r.router.bias, r.weight, r.bias)]
    torch.testing.assert_close(ours, [p.detach() for p in moving])
    assert all(not torch.equal(p, s) for p, s in zip(ours, start, strict=True))


def test_moetta_routes_layers_of_libraries():
    """A LayerNorm of (B, C, H, W), as torchvision and timm derive it."""

    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    torch.manual_seed(0)
    network = nn.Sequential(
        LayerNorm2d(3), nn.Conv2d(3, 5, 3), LayerNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)
    )
    adapter = cafe.create("moetta", cafe.split_classifier(network), experts=2)
    images = torch.randn(8, 3, 6, 6)
    torch.testing.assert_close(adapter(images), network(images).detach())
    assert adapter.report.stepped and adapter.routed[0].weight.shape == (2, 5)
    with torch.no_grad():
        adapter.routed[0].bias.copy_(torch.arange(10.0).view(2, 5))
        chosen = adapter.routed[0].router(network[1](network[0](images)).mean((2, 3))).argmax(1)
        inside = network[2](network[1](network[0](images))) + adapter.routed[0].bias[chosen][:, :, None, None]
        adapter.routed[0].weight.zero_()
        torch.testing.assert_close(adapter.predict(images), network[3:](inside))
    with pytest.raises(ValueError, match="but the first, but this classifier has 1"):
        cafe.create("moetta", cafe.split_classifier(nn.Sequential(nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 2))))


# Augmentation


def test_augmentation_is_that_of_pixels_whatever_the_normalisation():
    from cafe_tta.augmentation import Augmentation

    pixels = torch.rand(4, 3, 12, 16, dtype=torch.float64)
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0.0, 1.0  # black and white are there
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    shape = (1, 3, 1, 1)
    normal = (pixels - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)

    def made(augmentation, images):
        return augmentation(images, torch.Generator().manual_seed(5))

    expected = made(Augmentation((0.0,) * 3, (1.0,) * 3), pixels)
    assert expected.min() >= 0 and expected.max() <= 1 and (expected - pixels).abs().max() > 0.1
    for found in (made(Augmentation(mean, std), normal), made(Augmentation(), normal)):
        back = found * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
        torch.testing.assert_close(back, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="expected `pixel_mean` and `pixel_std` of 3 channels, but got 1 and 1"):
        made(Augmentation((0.5,), (0.5,)), normal)
    with pytest.raises(ValueError, match=r"expected images \(batch, channels, height, width\) to augment"):
        made(Augmentation(), normal.flatten(1))
    with pytest.raises(ValueError, match="expected `pixel_mean` and `pixel_std` together, but got one of them"):
        cafe.ROIDConfig(pixel_mean=[0.5])


def test_commands_and_benchmarks_say_how_pixels_were_normalised(sharp, tmp_path):
    from cafe_tta.methods import knowing_pixels
    from cafe_tta.methods.choice import MethodOptions

    preprocessing = SimpleNamespace(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    model = SimpleNamespace(classifier=sharp.classifier, preprocessing=preprocessing)
    adapter = MethodOptions(method="roid", set=["lr=0.1"]).adapter(model, {})
    assert adapter.config.pixel_mean == [0.1, 0.2, 0.3] and adapter.config.pixel_std == [0.4, 0.5, 0.6]
    told = cafe.CoTTAConfig(pixel_mean=[0.5] * 3, pixel_std=[0.2] * 3)
    assert knowing_pixels(told, [0.1], [0.2]) is told
    assert knowing_pixels(cafe.SARConfig(), [0.1], [0.2]) == cafe.SARConfig()
    adapter(sharp.batches[0])
    adapter.save(tmp_path / "state.safetensors")
    again = cafe.load_adapter(tmp_path / "state.safetensors", sharp.classifier)
    assert torch.equal(again(sharp.batches[1]), adapter(sharp.batches[1]))


@pytest.mark.parametrize("name", ["eata", "ttac", "actmad"])
def test_one_file_has_the_state_and_what_the_source_gave(name, source, tmp_path):
    adapter = cafe.create(name, source.classifier, source.needs[cafe.METHODS[name].needs])
    adapter(source.corrupted)
    adapter.save(tmp_path / "state.safetensors")
    again = cafe.load_adapter(tmp_path / "state.safetensors", source.classifier)
    assert torch.equal(again(source.corrupted), adapter(source.corrupted))


@pytest.mark.parametrize("name", ["lame", "unmix-tns", "moetta"])
def test_answers_that_no_ordinary_model_gives_are_not_exported(name, source, source_without_batchnorm):
    made = source_without_batchnorm if name == "moetta" else source
    with pytest.raises(ValueError, match=f"{name} .*which no ordinary model does"):
        cafe.create(name, made.classifier).export()
    if name == "unmix-tns":
        with pytest.raises(ValueError, match="normalisation='unmix-tns' .*which no ordinary model does"):
            cafe.create("tent", made.classifier, normalisation=name).export()


def test_parts_of_the_augmentation():
    """Colours against the standard library; geometry by images whose turn is known."""
    import colorsys

    from cafe_tta import augmentation

    pixels = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    shifted = augmentation.shifted_hue(pixels, 0.21)
    rows = [image.movedim(1, 3).reshape(-1, 3).tolist() for image in (pixels, shifted)]
    for before, after in zip(*rows, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb((h + 0.21) % 1, s, v))
    flat = torch.full((1, 3, 9, 9), 0.25)
    torch.testing.assert_close(augmentation._blurred(flat, 0.4), flat[:, :, 2:-2, 2:-2])
    dot = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    dot[0, 0, 2, 2] = 1
    weights = [math.exp(-0.5 * (i / 0.8) ** 2) for i in (-2, -1, 0, 1, 2)]
    assert augmentation._blurred(dot, 0.8).item() == pytest.approx((weights[2] / sum(weights)) ** 2)
    # A map that rises along x and y stays such a map when it is turned, shifted and zoomed: only its slopes change.
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    slope = torch.stack([0.01 * x, 0.01 * y, torch.full_like(x, 0.5)])[None].double()
    made = augmentation.Augmentation(edges="border", blur=False, noise=0.0)
    moved = made._moved(slope, torch.Generator().manual_seed(1))
    inside = moved[0, :, 12:20, 12:20]
    along, down = inside.diff(dim=2)[:2].mean((1, 2)) * 100, inside.diff(dim=1)[:2].mean((1, 2)) * 100
    turn = torch.stack([along, down], 1)  # x' and y' for a step along x and along y
    zoom = turn.det().sqrt()
    assert 1 / 1.1 <= zoom <= 1 / 0.9
    torch.testing.assert_close(turn @ turn.T, zoom**2 * torch.eye(2, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert abs(math.degrees(math.asin(float(turn[1, 0] / zoom)))) <= 15 and abs(float(turn[1, 0])) > 1e-3
    assert inside[2].std() < 1e-9
