"""Every method against an independent, straightforward computation of the same steps on a small network.

The reference shares no code with the library: plain networks, plain torch, explicit loops, hand-written SGD.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cafe_tta as cafe


def rebuilt(classifier):
    """The same network as a plain nn.Sequential: backbone layers, then the head."""
    layers = copy.deepcopy(classifier.backbone.model)
    layers[-1] = copy.deepcopy(classifier.head)
    return layers.eval().requires_grad_(True)


def batchnorms(network):
    return [layer for layer in network if isinstance(layer, nn.BatchNorm2d)]


def batches(source):
    return [source.corrupted[:32], source.corrupted[16:48]]


def reference_run(network, batches, loss, moving, lr, momentum, train_batchnorm=True):
    """Two steps of SGD with momentum, by hand. Returns the logits of the passes that made the losses."""
    velocities = [torch.zeros_like(parameter) for parameter in moving]
    answers = []
    for images in batches:
        for layer in batchnorms(network):
            layer.train(train_batchnorm)
        features = network[:-1](images)
        logits = network[-1](features)
        gradients = torch.autograd.grad(loss(features, logits), moving)
        with torch.no_grad():
            for parameter, velocity, gradient in zip(moving, velocities, gradients, strict=True):
                velocity.mul_(momentum).add_(gradient)
                parameter.sub_(lr * velocity)
        answers.append(logits.detach())
    network.eval()
    return answers


def assert_same_network(adapter_classifier, network, rtol=1e-4, atol=1e-6):
    ours = {k.removeprefix("model."): v for k, v in adapter_classifier.backbone.state_dict().items()}
    for name, tensor in network[:-1].state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(adapter_classifier.head.weight, network[-1].weight, rtol=rtol, atol=atol)
    torch.testing.assert_close(adapter_classifier.head.bias, network[-1].bias, rtol=rtol, atol=atol)


def assert_moved(adapter, source):
    """A step that changes nothing would agree with a reference that changes nothing."""
    before, after = source.classifier.state_dict(), adapter.classifier.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def entropy_by_loop(logits):
    total = 0
    for row in logits:
        probabilities = torch.exp(row) / torch.exp(row).sum()
        total = total - sum(p * torch.log(p) for p in probabilities)
    return total / len(logits)


def infomax_by_loop(logits):
    marginal = torch.stack([torch.exp(row) / torch.exp(row).sum() for row in logits]).mean(0)
    return entropy_by_loop(logits) + sum(p * torch.log(p) for p in marginal)


def alignment_by_loop(features, source, floor):
    total = 0
    features = features.double()
    for dims, cov in zip(source.groups, source.covs, strict=True):
        values, vectors = torch.linalg.eigh(cov)
        ours = vectors @ torch.diag(values.clamp(min=floor)) @ vectors.T
        group = features[:, dims]
        delta = group.mean(0) - source.mean[dims]
        theirs = (group - group.mean(0)).T @ (group - group.mean(0)) / len(group)
        a, b = torch.linalg.inv(ours), torch.linalg.inv(theirs)
        total = total + (torch.trace(a @ theirs) + torch.trace(b @ ours) - 2 * len(dims) + delta @ (a + b) @ delta) / 4
    return (total / len(source.groups)).float()


def test_source_is_the_network_as_it_is(source):
    adapter = cafe.create("source", source.classifier)
    network = rebuilt(source.classifier)
    for images in batches(source):
        assert torch.equal(adapter(images), network(images))
    assert_same_network(adapter.classifier, network, rtol=0, atol=0)


def test_adabn_follows_the_batches(source):
    adapter = cafe.create("adabn", source.classifier)
    answers = [adapter(images) for images in batches(source)]
    network = rebuilt(source.classifier)
    for images, answer in zip(batches(source), answers, strict=True):
        activations = images
        for layer in network:
            if isinstance(layer, nn.BatchNorm2d):
                mean = activations.mean((0, 2, 3))
                var = activations.var((0, 2, 3), correction=0)
                unbiased = activations.var((0, 2, 3), correction=1)
                with torch.no_grad():
                    layer.running_mean.copy_(0.9 * layer.running_mean + 0.1 * mean)
                    layer.running_var.copy_(0.9 * layer.running_var + 0.1 * unbiased)
                    layer.num_batches_tracked += 1
                normal = (activations - mean[:, None, None]) / (var[:, None, None] + layer.eps).sqrt()
                activations = normal * layer.weight[:, None, None] + layer.bias[:, None, None]
            else:
                activations = layer(activations)
        torch.testing.assert_close(answer, activations.detach(), rtol=1e-4, atol=1e-5)
    assert_same_network(adapter.classifier, network)
    torch.testing.assert_close(adapter.predict(source.corrupted), network(source.corrupted).detach())


def test_adabn_average_over_all_batches(source):
    adapter = cafe.create("adabn", source.classifier, momentum=None)
    first_inputs = []
    for images in batches(source):
        adapter(images)
        first_inputs.append(rebuilt(source.classifier)[0](images))
    means = torch.stack([activations.mean((0, 2, 3)) for activations in first_inputs]).mean(0)
    torch.testing.assert_close(adapter.classifier.backbone.model[1].running_mean, means.detach())


def test_adabn_prior_mixes_source_and_batch(source):
    adapter = cafe.create("adabn", source.classifier, prior=16)
    images = source.corrupted[:32]
    answer = adapter(images)
    activations = images
    for layer in rebuilt(source.classifier).requires_grad_(False):
        if isinstance(layer, nn.BatchNorm2d):
            share = 32 / (16 + 32)
            mean = (1 - share) * layer.running_mean + share * activations.mean((0, 2, 3))
            var = (1 - share) * layer.running_var + share * activations.var((0, 2, 3), correction=0)
            activations = F.batch_norm(activations, mean, var, layer.weight, layer.bias, False, 0.0, layer.eps)
        else:
            activations = layer(activations)
    torch.testing.assert_close(answer, activations.detach(), rtol=1e-4, atol=1e-5)


def test_adabn_undoes_an_affine_shift_of_the_channels(source):
    """Statistics of the shifted images, after BatchNorm, are those of the images."""
    adapter = cafe.create("adabn", source.classifier)
    images = source.images[:64]
    plain = adapter(images)
    adapter.reset()
    torch.testing.assert_close(adapter(images * 3), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("preset", ["cifar", "imagenet"])
def test_tent(source, preset):
    adapter = cafe.create("tent", source.classifier, preset=preset)
    answers = [adapter(images) for images in batches(source)]
    network = rebuilt(source.classifier)
    moving = [parameter for layer in batchnorms(network) for parameter in (layer.weight, layer.bias)]
    lr = {"cifar": 1e-3, "imagenet": 2.5e-4}[preset]
    expected = reference_run(network, batches(source), lambda _, logits: entropy_by_loop(logits), moving, lr, 0.8)
    for a, b in zip(answers, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    ours = dict(adapter.classifier.backbone.model.named_parameters())
    for name, tensor in network[:-1].named_parameters():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7)
    assert_moved(adapter, source)


def test_tent_normalises_with_the_batch_in_every_mode(source):
    adapter = cafe.create("tent", source.classifier, lr=0.0).eval()
    network = rebuilt(source.classifier)
    for layer in batchnorms(network):
        layer.train()
    expected = network(source.corrupted).detach()
    torch.testing.assert_close(adapter(source.corrupted), expected)
    torch.testing.assert_close(adapter.predict(source.corrupted), expected)


def test_tent_original_preset_is_adam(source):
    adapter = cafe.create("tent", source.classifier, preset="original")
    for images in batches(source):
        adapter(images)
    network = rebuilt(source.classifier)
    moving = [parameter for layer in batchnorms(network) for parameter in (layer.weight, layer.bias)]
    first, second = [torch.zeros_like(p) for p in moving], [torch.zeros_like(p) for p in moving]
    for step, images in enumerate(batches(source), start=1):
        for layer in batchnorms(network):
            layer.train()
        for p, m, v, g in zip(
            moving, first, second, torch.autograd.grad(entropy_by_loop(network(images)), moving), strict=True
        ):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            with torch.no_grad():
                p.sub_(1e-3 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    ours = dict(adapter.classifier.backbone.model.named_parameters())
    for name, tensor in network[:-1].named_parameters():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


def test_infomax(source):
    adapter = cafe.create("infomax", source.classifier, preset="cifar")
    answers = [adapter(images) for images in batches(source)]
    network = rebuilt(source.classifier)
    moving = list(network[:-1].parameters())
    expected = reference_run(network, batches(source), lambda _, logits: infomax_by_loop(logits), moving, 1e-3, 0.8)
    torch.testing.assert_close(answers, expected, rtol=1e-4, atol=1e-5)
    assert_same_network(adapter.classifier, network)
    assert_moved(adapter, source)


@pytest.mark.parametrize("name", ["cafe", "cafe-dimwise", "cafe-no-infomax"])
@pytest.mark.parametrize("preset", [None, "cifar"])
def test_cafe_and_its_variants(source, name, preset):
    stats = source.needs["stats"]
    adapter = cafe.create(name, source.classifier, stats, preset=preset, lr=1e-2, min_samples=0)
    answers = [adapter(images) for images in batches(source)]
    groups = stats
    if name == "cafe-dimwise":
        cov = source.feature_stats.cov
        live = torch.cat(list(stats.groups)).sort().values
        groups = cafe.SourceStats(stats.mean, [d[None] for d in live], [cov[d, d].reshape(1, 1) for d in live])

    def loss(features, logits):
        alignment = alignment_by_loop(features, groups, adapter.config.eigenvalue_floor)
        return alignment if name == "cafe-no-infomax" else alignment + infomax_by_loop(logits)

    network = rebuilt(source.classifier)
    expected = reference_run(network, batches(source), loss, list(network[:-1].parameters()), 1e-2, 0.8)
    torch.testing.assert_close(answers, expected, rtol=1e-3, atol=1e-4)
    assert_same_network(adapter.classifier, network, rtol=1e-3, atol=1e-5)
    assert_moved(adapter, source)
    assert adapter.report.notes["padded_groups"] == 0


def test_normalisation_with_source_statistics(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], normalisation="source", min_samples=0)
    for images in batches(source):
        adapter(images)

    def loss(features, logits):
        floor = adapter.config.eigenvalue_floor
        return alignment_by_loop(features, source.needs["stats"], floor) + infomax_by_loop(logits)

    network = rebuilt(source.classifier)
    moving = list(network[:-1].parameters())
    reference_run(network, batches(source), loss, moving, 1e-3, 0.8, train_batchnorm=False)
    assert_same_network(adapter.classifier, network, rtol=1e-3, atol=1e-5)
    assert_moved(adapter, source)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_normalisation_with_a_blend(source, weight):
    """Gradients flow through the batch's share of the statistics; running statistics follow the blend."""
    adapter = cafe.create("infomax", source.classifier, normalisation="blend", blend=weight)
    answers = [adapter(images) for images in batches(source)]
    network = rebuilt(source.classifier)
    moving = list(network[:-1].parameters())
    velocities = [torch.zeros_like(parameter) for parameter in moving]
    origin = {layer: (layer.running_mean.clone(), layer.running_var.clone()) for layer in batchnorms(network)}
    for images, answer in zip(batches(source), answers, strict=True):
        activations = images
        for layer in network:
            if isinstance(layer, nn.BatchNorm2d):
                mean = (1 - weight) * origin[layer][0] + weight * activations.mean((0, 2, 3))
                var = (1 - weight) * origin[layer][1] + weight * activations.var((0, 2, 3), correction=0)
                with torch.no_grad():
                    layer.running_mean.mul_(0.9).add_(0.1 * mean)
                    layer.running_var.mul_(0.9).add_(0.1 * var)
                normal = (activations - mean[:, None, None]) / (var[:, None, None] + layer.eps).sqrt()
                activations = normal * layer.weight[:, None, None] + layer.bias[:, None, None]
            else:
                activations = layer(activations)
        torch.testing.assert_close(answer, activations.detach(), rtol=1e-3, atol=1e-4)
        gradients = torch.autograd.grad(infomax_by_loop(activations), moving)
        with torch.no_grad():
            for parameter, velocity, gradient in zip(moving, velocities, gradients, strict=True):
                velocity.mul_(0.8).add_(gradient)
                parameter.sub_(1e-3 * velocity)
    assert_same_network(adapter.classifier, network, rtol=1e-3, atol=1e-5)


def test_parameters_norm_moves_nothing_else(source):
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], parameters="norm")
    adapter(source.corrupted)
    before = dict(source.classifier.named_parameters())
    moved = {name for name, p in adapter.classifier.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"backbone.model.{layer}.{part}" for layer in (1, 4) for part in ("weight", "bias")}


def test_answer_after_is_a_second_pass(source):
    images = source.corrupted
    before = cafe.create("cafe", source.classifier, source.needs["stats"], lr=0.01)
    after = cafe.create("cafe", source.classifier, source.needs["stats"], lr=0.01, answer="after")
    evaluated = cafe.create("cafe", source.classifier, source.needs["stats"], lr=0.01, answer="after-eval")
    first, second, third = before(images), after(images), evaluated(images)
    network = rebuilt(before.classifier)  # as it is after the step
    torch.testing.assert_close(third, network(images).detach())
    for layer in batchnorms(network):
        layer.train()
    torch.testing.assert_close(second, network(images).detach())
    assert not torch.equal(first, second) and not torch.equal(second, third)
    for a, b in zip(before.classifier.state_dict().values(), after.classifier.state_dict().values(), strict=True):
        assert torch.equal(a, b)  # the second pass is not counted in the running statistics


def soft_histogram_by_loop(values, edges, temperature):
    """10 soft bins by their definition, sample by sample."""
    counts = [torch.zeros(len(edges) + 1, dtype=values.dtype)]
    for x in values:
        logits = torch.stack([(j + 1) * x - sum(edges[:j]) for j in range(len(edges) + 1)])
        counts.append(torch.softmax(logits / temperature, 0))
    return torch.stack(counts).sum(0)


@pytest.mark.parametrize("preset", ["cifar", "cifar-online"])
def test_fr(source, preset):
    temperature = {"cifar": 0.01, "cifar-online": 0.05}[preset]
    adapter = cafe.create("fr", source.classifier, source.needs["histograms"], preset=preset, answer="before")
    images_of_two = [images[:12] for images in batches(source)]
    for images in images_of_two:
        adapter(images)
    network = rebuilt(source.classifier)
    with torch.no_grad():
        features = network[:-1](source.images).double()
        logits = network[-1](network[:-1](source.images)).double()

    units = []
    for layer in (features, logits):
        for unit in layer.T:
            low, spread = unit.min(), unit.max() - unit.min()
            edges = [low / spread + i / 8 for i in range(9)]
            units.append((spread, edges, soft_histogram_by_loop(unit / spread, edges, temperature)))

    def loss(features, logits):
        scores = []
        for column, (spread, edges, counts) in zip(torch.cat([features, logits], 1).double().T, units, strict=True):
            p = soft_histogram_by_loop(column / spread, edges, temperature)
            p, q = p / p.sum(), counts / counts.sum()
            kl = (p * ((p + 1e-8) / (q + 1e-8)).log()).sum() + (q * ((q + 1e-8) / (p + 1e-8)).log()).sum()
            scores.append(kl / math.log(10))
        return torch.stack(scores[: features.shape[1]]).mean() + torch.stack(scores[features.shape[1] :]).mean()

    moving = [p for layer in network if not isinstance(layer, nn.Linear) for p in layer.parameters()]
    reference_run(network, images_of_two, loss, moving, 1e-3, 0.9)
    assert_same_network(adapter.classifier, network, rtol=1e-3, atol=1e-5)
    assert_moved(adapter, source)


def test_fr_leaves_linear_layers_alone(source):
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 8), nn.Linear(8, 4)
    )
    classifier = cafe.split_classifier(network)
    adapter = cafe.create("fr", classifier, cafe.SourceHistograms.fit(classifier, source.loader))
    adapter(source.corrupted)
    before = classifier.state_dict()
    moved = {name for name, tensor in adapter.classifier.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "backbone.model.0.weight" in moved and not any(".4." in name or "head" in name for name in moved)


def test_bacs(source):
    posterior = source.needs["posterior"]
    adapter = cafe.create("bacs", source.classifier, posterior, prior_weight=0.01, variance_floor=1e-6)
    answers = [adapter(images) for images in batches(source)]
    expected = []
    for number, member in enumerate(posterior.members):
        network = rebuilt(source.classifier)
        names = [
            ("backbone.model." + name) if int(name.split(".")[0]) < 9 else name.replace("9.", "head.")
            for name in network.state_dict()
        ]
        with torch.no_grad():
            for name, tensor in zip(names, network.state_dict().values(), strict=True):
                tensor.copy_(member.mean[name] if name in member.mean else member.buffers[name])
        parameters = list(network.parameters())
        means = [parameter.detach().clone() for parameter in parameters]
        variances = [member.variance[n] for n in names if n in member.mean]

        def loss(_, logits, parameters=parameters, means=means, variances=variances):
            prior = sum(((p - m) ** 2 / (v + 1e-6)).sum() for p, m, v in zip(parameters, means, variances, strict=True))
            return entropy_by_loop(logits) + 0.01 * prior / 2

        expected.append(reference_run(network, batches(source), loss, parameters, 1e-3, 0.8))
        assert_same_network(adapter.members[number].classifier, network)
    for number, answer in enumerate(answers):
        probabilities = (expected[0][number].softmax(1) + expected[1][number].softmax(1)) / 2
        torch.testing.assert_close(answer.softmax(1), probabilities, rtol=1e-4, atol=1e-5)


def test_bacs_starts_from_the_posterior_mean(source):
    adapter = cafe.create("bacs", source.classifier, source.needs["posterior"], ensemble_size=1)
    (member,) = adapter.members
    for name, parameter in member.classifier.named_parameters():
        assert torch.equal(parameter, source.needs["posterior"].members[0].mean[name])


def test_t3a(source):
    adapter = cafe.create("t3a", source.classifier, support_size=3)
    network = rebuilt(source.classifier)
    head = network[-1]
    supports = [(row.detach(), head(row).detach()) for row in head.weight]
    for images in batches(source):
        answer = adapter(images)
        with torch.no_grad():
            features = network[:-1](images)
            supports += [(z, head(z)) for z in features]
            weights, kept = [], []
            for label in range(4):
                own = [(z, v, entropy_by_loop(v[None]).item()) for z, v in supports if v.argmax() == label]
                own = sorted(own, key=lambda support: support[2])[:3]
                kept += [(z, v) for z, v, _ in own]
                total = sum((z / z.norm() for z, _, _ in own), torch.zeros(12))
                weights.append(total / total.norm().clamp_min(1e-12))
            supports = kept
            expected = features @ torch.stack(weights).T
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(adapter.classifier.head.weight, source.classifier.head.weight)


def test_t3a_keeps_all_when_told_to(source):
    adapter = cafe.create("t3a", source.classifier, support_size=None)
    for images in batches(source):
        adapter(images)
    assert len(adapter.supports) == 4 + 32 + 32


def test_dann(source):
    config = cafe.DANNConfig(lr=0.01, hidden=7)
    loader = source.loader
    adapter = cafe.DANN(source.classifier, loader, config)
    network = rebuilt(source.classifier)
    discriminator = copy.deepcopy(adapter.discriminator)
    for images in batches(source):
        adapter(images)
    parameters = [*network.parameters(), *discriminator.parameters()]
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    for (source_images, labels), images in zip(loader, batches(source), strict=False):
        for layer in batchnorms(network):
            layer.train()
        features = network[:-1](images)
        running = {
            layer: (layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone())
            for layer in batchnorms(network)
        }
        source_features = network[:-1](source_images)
        label_loss = F.nll_loss(network[-1](source_features).log_softmax(1), labels)
        guess = discriminator(torch.cat([source_features, features]))[:, 0]
        truth = torch.tensor([1.0] * len(source_features) + [0.0] * len(features))
        domain_loss = -(truth * F.logsigmoid(guess) + (1 - truth) * F.logsigmoid(-guess)).mean()
        count = len(list(network.parameters()))
        of_label = torch.autograd.grad(label_loss, parameters[:count], retain_graph=True, allow_unused=True)
        of_domain = torch.autograd.grad(domain_loss, parameters, allow_unused=True)
        with torch.no_grad():
            for i, (parameter, velocity) in enumerate(zip(parameters, velocities, strict=True)):
                domain = of_domain[i] if of_domain[i] is not None else torch.zeros_like(parameter)
                gradient = of_label[i] - domain if i < count else domain  # reversed for all but the discriminator
                velocity.mul_(0.8).add_(gradient)
                parameter.sub_(0.01 * velocity)
            for layer, (mean, var, tracked) in running.items():  # the target's statistics alone
                layer.running_mean.copy_(mean)
                layer.running_var.copy_(var)
                layer.num_batches_tracked.copy_(tracked)
    assert_same_network(adapter.classifier, network, rtol=1e-3, atol=1e-5)
    for ours, expected in zip(adapter.discriminator.parameters(), discriminator.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)


def test_dann_fits_for_its_number_of_iterations(source):
    adapter = cafe.create("dann", source.classifier, source.loader, iterations=5, hidden=4)
    adapter.fit([source.corrupted[:16], source.corrupted[16:32]])
    assert adapter.counters.steps == 5
    with pytest.raises(ValueError, match="the loader was empty"):
        cafe.create("dann", source.classifier, source.loader, iterations=5, hidden=4).fit([])


def test_cafe_remembers_earlier_batches_where_a_batch_is_too_small(source):
    """Small batches are padded with the stream's own moments; the report says for how many groups."""
    stats = source.needs["stats"]
    adapter = cafe.create(
        "cafe", source.classifier, stats, lr=0.0, samples_per_dim=3, min_samples=0, normalisation="source"
    )
    widest = stats.widest_group
    small = [source.corrupted[i : i + 4] for i in range(0, 3 * widest + 8, 4)]
    for images in small:
        adapter(images)
    assert adapter.report.notes["padded_groups"] > 0
    with torch.no_grad():
        seen = source.classifier.backbone(torch.cat(small)[-3 * widest :])
    whole = cafe.losses.alignment(seen, stats).item()
    assert adapter.report.notes["alignment"] == pytest.approx(whole, rel=0.25)


def test_a_few_images_do_not_end_the_model(source):
    """A feature that is mostly 0 hardly varies among a few images, and the loss would be steep beyond measure."""
    stats = source.needs["stats"]
    frozen = {"lr": 0.0, "normalisation": "source", "memory": False}
    adapters = {n: cafe.create("cafe", source.classifier, stats, min_samples=n, **frozen) for n in (0, 64)}
    few = source.corrupted[:8].clone()
    few[1:] = few[0] + 0.01 * few[1:]  # nearly the same image, eight times
    for adapter in adapters.values():
        adapter(few)
    values = {n: adapter.report.notes["alignment"] for n, adapter in adapters.items()}
    assert values[64] < 0.1 * values[0]
    assert adapters[64].report.notes["padded_groups"] == len(stats.groups)
    many = torch.cat([source.corrupted, source.corrupted.flip(3)])[:64]
    adapters[64].reset()
    adapters[64](many)
    whole = cafe.losses.alignment(source.classifier.backbone(many), stats, samples_per_dim=2.0).item()
    assert len(many) == 64 and adapters[64].report.notes["alignment"] == pytest.approx(whole, rel=1e-4)


def test_cafe_step_brings_the_features_home(source):
    """The claim of the method, on a shift of the images: alignment falls."""
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], min_samples=0)
    values = []
    for _ in range(30):
        adapter(source.corrupted)
        values.append(adapter.report.notes["alignment"])
    assert values[-1] < 0.8 * values[0]


def test_infomax_prefers_diverse_to_collapsed():
    collapsed = torch.tensor([[9.0, 0, 0]] * 6)
    diverse = 9.0 * torch.eye(3).repeat(2, 1)
    assert cafe.losses.infomax(diverse) < cafe.losses.infomax(collapsed) - 0.5


def test_entropy_agrees_with_numpy_and_does_not_overflow():
    logits = torch.tensor(np.random.default_rng(0).normal(size=(20, 7)) * 5)
    probabilities = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    expected = -(probabilities * np.log(probabilities)).sum(1)
    np.testing.assert_allclose(cafe.losses.entropy(logits).numpy(), expected)
    assert torch.isfinite(cafe.losses.entropy(torch.tensor([[1e4, -1e4]]))).all()


def test_tent_answers_a_single_image_whose_feature_map_is_one_pixel():
    """Nothing to normalise with: the source's statistics serve, for this image only."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)).eval()
    images = torch.randn(6, 3, 8, 8)
    adapter = cafe.create("tent", cafe.split_classifier(network))
    torch.testing.assert_close(adapter(images[:1]), network(images[:1]).detach())
    assert "min_batch" in adapter.report.reason and adapter.classifier.backbone.model[1].running_mean is None
    adapter(images)
    assert adapter.report.stepped


def test_adapt_from_leaves_what_comes_before_alone(source):
    """And its gradient is not computed at all."""
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], adapt_from="3")
    adapter(source.corrupted)
    before = dict(source.classifier.named_parameters())
    moved = {name for name, p in adapter.classifier.named_parameters() if not torch.equal(p, before[name])}
    # The bias in front of a BatchNorm layer has no effect, and no gradient but rounding.
    bias = "backbone.model.3.bias"
    assert moved - {bias} == {f"backbone.model.{name}" for name in ("3.weight", "4.weight", "4.bias")}
    torch.testing.assert_close(dict(adapter.classifier.named_parameters())[bias], before[bias], rtol=0, atol=1e-7)
    adapter.normaliser.adapting()
    assert not adapter.classifier.backbone.model[:3](source.corrupted).requires_grad


def test_adapt_from_takes_the_same_step_for_what_moves(source):
    """The later layers' first step does not depend on whether the earlier ones move too."""
    whole, part = (cafe.create("infomax", source.classifier, adapt_from=layer, momentum=0.0) for layer in (None, "3"))
    whole(source.corrupted), part(source.corrupted)
    for layer in (3, 4):
        for a, b in zip(
            whole.classifier.backbone.model[layer].parameters(),
            part.classifier.backbone.model[layer].parameters(),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_adapt_from_of_another_model_is_refused(source):
    with pytest.raises(
        ValueError, match="expected `adapt_from` to name a module of the model, but got 'layer3'; its parts: 0, 1"
    ):
        cafe.create("infomax", source.classifier, adapt_from="layer3")
    with pytest.raises(ValueError, match="to name a module with parameters, but '2' has none"):
        cafe.create("infomax", source.classifier, adapt_from="2")


def test_every_takes_a_step_on_each_nth_batch(source):
    adapter = cafe.create("infomax", source.classifier, every=3)
    stepped = []
    for _ in range(7):
        adapter(source.corrupted)
        stepped.append(adapter.report.stepped)
    assert stepped == [True, False, False, True, False, False, True]
    assert adapter.counters.steps == 3 and adapter.counters.batches == 7
    assert "every=3" in repr(cafe.create("infomax", source.classifier, every=3))


@pytest.mark.parametrize("preset", [None, "cifar"])
def test_a_short_last_batch_is_padded_with_the_batches_before_it(source, preset):
    """A few images, fewer than make a good covariance, may not throw the weights about."""
    adapter = cafe.create("cafe", source.classifier, source.needs["stats"], preset=preset)
    adapter(source.corrupted)
    whole = [parameter.clone() for parameter in adapter.classifier.parameters()]
    first = sum((a - b).norm() ** 2 for a, b in zip(whole, source.classifier.parameters(), strict=True)) ** 0.5
    adapter.optimizer.state.clear()  # no momentum: the second step by itself
    adapter(source.corrupted[:6])
    second = sum((a - b).norm() ** 2 for a, b in zip(whole, adapter.classifier.parameters(), strict=True)) ** 0.5
    assert adapter.report.stepped and adapter.report.notes["padded_groups"] == 3
    assert second < first


@pytest.mark.parametrize("max_change", [1e-6, 1e3])
def test_a_step_is_at_most_a_share_of_the_weights(source, max_change):
    """A long gradient is clipped and keeps its direction; a short one stays as it is."""
    steps = []
    for limit in (max_change, None):
        adapter = cafe.create("cafe", source.classifier, source.needs["stats"], lr=0.1, max_change=limit)
        before = torch.cat([p.detach().flatten().clone() for p in adapter.moving()])
        adapter(source.corrupted)
        steps.append(torch.cat([p.detach().flatten() for p in adapter.moving()]) - before)
        assert ("clipped" in adapter.report.notes) == (limit == 1e-6)
    limited, free = (step.double() for step in steps)
    if max_change > 1:
        assert torch.equal(limited, free)
    else:
        torch.testing.assert_close(
            limited.norm() / before.double().norm(), torch.tensor(1e-6).double(), rtol=0.1, atol=0
        )
        assert torch.nn.functional.cosine_similarity(limited, free, dim=0) > 0.98
    with pytest.raises(ValueError, match="expected `max_change` to be above 0 or None, but got 0"):
        cafe.create("cafe", source.classifier, source.needs["stats"], max_change=0)


def test_every_holds_for_the_members_of_an_ensemble_too(source):
    adapter = cafe.create("bacs", source.classifier, source.needs["posterior"], every=2)
    stepped = []
    for _ in range(4):
        adapter(source.corrupted)
        stepped.append(adapter.report.stepped)
    assert stepped == [True, False, True, False]
