import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cafe_tta import channels

SHAPES = st.tuples(st.integers(2, 5), st.integers(1, 4), st.lists(st.integers(1, 4), max_size=3))


def activations(shape, seed=0, dtype=torch.float64):
    batch, width, rest = shape
    generator = torch.Generator().manual_seed(seed)
    return 3 + torch.randn(batch, width, *rest, dtype=dtype, generator=generator)


@settings(deadline=None)
@given(SHAPES, st.integers(0, 99))
def test_variance_and_mean_of_each_channel(shape, seed):
    found = activations(shape, seed)
    var, mean = channels.var_mean(found)
    columns = found.transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean, torch.stack([column.mean() for column in columns]))
    torch.testing.assert_close(var, torch.stack([((column - column.mean()) ** 2).mean() for column in columns]))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_float32_has_digits_left(layout):
    """A mean a hundred times the deviation: squares that are subtracted would have three digits left."""
    found = (100 + torch.randn(64, 5, 8, 8, generator=torch.Generator().manual_seed(0))).contiguous(
        memory_format=layout
    )
    var, mean = channels.statistics(found)
    true_var, true_mean = torch.var_mean(found.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(var.double(), true_var, rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), true_mean, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(4, 3, []), (3, 2, [2, 3]), (2, 2, [2, 2, 2])])
def test_gradients_of_variance_and_mean(shape):
    found = activations(shape).requires_grad_()
    assert torch.autograd.gradcheck(channels.var_mean, (found,))


@pytest.mark.parametrize("shape", [(4, 3, []), (3, 2, [2, 3])])
def test_a_layer_with_constants_gets_the_gradient_of_its_statistics(shape):
    """(x - m) / √v, where m and v come from x itself and from leaves."""
    found = activations(shape).requires_grad_()
    shift, scale = torch.rand(2, shape[1], dtype=torch.float64).requires_grad_().unbind()

    def through_layer(values, shift, scale):
        var, mean = channels.var_mean(values)
        mean, var = mean * 0.3 + shift, var * 0.3 + scale + 1e-5
        inside = channels.normalised_by_layer(values, mean, var)
        return nn.functional.batch_norm(inside, mean.detach(), var.detach() - 1e-5, eps=1e-5)

    def plainly(values, shift, scale):
        dims = channels.dims(values)
        mean, var = values.mean(dims) * 0.3 + shift, values.var(dims, correction=0) * 0.3 + scale + 1e-5
        return (values - channels.spread(mean, values)) / channels.spread(var, values).sqrt()

    inputs = (found, shift.detach().requires_grad_(), scale.detach().requires_grad_())
    torch.testing.assert_close(through_layer(*inputs), plainly(*inputs))
    weights = torch.randn(found.shape, dtype=torch.float64)
    ours = torch.autograd.grad((through_layer(*inputs) * weights).sum(), inputs)
    theirs = torch.autograd.grad((plainly(*inputs) * weights).sum(), inputs)
    torch.testing.assert_close(ours, theirs)
