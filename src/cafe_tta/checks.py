"""What every method must do, whatever it computes. Run them on a method of your own:

    for check in cafe_tta.checks.ALL:
        check(make_adapter, images)

`make_adapter()` gives a fresh adapter of the same classifier each time; `images` is a batch of at least 8 for it.
A check that fails raises AssertionError and says what was expected.
"""

import copy
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cafe_tta.adapter import Adapter, StepRefused
from cafe_tta.classifier import SplitClassifier

MakeAdapter = Callable[[], Adapter]


def check_answers_with_logits(make_adapter: MakeAdapter, images: Tensor) -> None:
    """A batch of B images gets finite logits of shape (B, classes), without a graph behind them."""
    adapter = make_adapter()
    logits = adapter(images)
    _expect(logits.shape == (len(images), adapter.classifier.num_classes), f"logits have shape {tuple(logits.shape)}")
    _expect(bool(torch.isfinite(logits).all()), "logits are not finite")
    _expect(not logits.requires_grad, "logits drag the graph along")
    _expect(adapter.report is not None and adapter.report.images == len(images), "the batch was not reported")


def check_source_untouched(make_adapter: MakeAdapter, images: Tensor) -> None:
    """One adapter never changes the classifier that another is made of."""
    untouched = make_adapter()
    before = {name: tensor.clone() for name, tensor in untouched.state_dict().items()}
    other = make_adapter()
    for _ in range(2):
        other(images)
    after = make_adapter().state_dict()
    for name, tensor in before.items():
        _expect(_equal(tensor, after[name]), f"`{name}` of the source classifier changed")


def check_input_untouched(make_adapter: MakeAdapter, images: Tensor) -> None:
    """The caller's images stay as they were."""
    before = images.clone()
    make_adapter()(images)
    _expect(_equal(images, before), "the images were changed in place")


def check_reset_is_exact(make_adapter: MakeAdapter, images: Tensor) -> None:
    """After reset the same batches get the same logits, bit for bit, and the state is the first one."""
    adapter = make_adapter()
    fresh = _snapshot(adapter)
    first = [adapter(images), adapter(images)]
    adapter.reset()
    _expect_state(adapter, fresh, "reset left")
    _expect(adapter.counters.batches == 0 and adapter.report is None, "reset left counters")
    second = [adapter(images), adapter(images)]
    _expect(all(map(_equal, first, second)), "after reset the same batches got other logits")


def check_same_images_same_logits(make_adapter: MakeAdapter, images: Tensor) -> None:
    """Two adapters that see the same stream agree bit for bit."""
    one, other = make_adapter(), make_adapter()
    for _ in range(2):
        _expect(_equal(one(images), other(images)), "two runs over the same images differ")


def check_works_under_no_grad(make_adapter: MakeAdapter, images: Tensor) -> None:
    """Callers in no_grad() or inference_mode() get the same answers, and the same adaptation."""
    plain, quiet, inference = make_adapter(), make_adapter(), make_adapter()
    expected = [plain(images), plain(images)]
    with torch.no_grad():
        _expect(all(map(_equal, expected, [quiet(images), quiet(images)])), "answers differ under no_grad()")
    with torch.inference_mode():
        answers = [inference(images.clone()), inference(images.clone())]
    _expect(all(map(_equal, expected, answers)), "answers differ under inference_mode()")
    with torch.inference_mode():
        made_inside = make_adapter()
    _expect(_equal(made_inside(images), expected[0]), "an adapter made under inference_mode() answers differently")


def check_ignores_train_and_eval(make_adapter: MakeAdapter, images: Tensor) -> None:
    """train() and eval() do not change what a method does."""
    plain, trained, evaluated = make_adapter(), make_adapter().train(), make_adapter().eval()
    for _ in range(2):
        expected = plain(images)
        _expect(_equal(trained.train()(images), expected), "train() changed the answers")
        _expect(_equal(evaluated.eval()(images), expected), "eval() changed the answers")
    _expect(_equal(trained.predict(images), evaluated.predict(images)), "train() changed predict()")


def check_follows_to(make_adapter: MakeAdapter, images: Tensor) -> None:
    """`.double()`, which stands for any `.to()`, moves everything, also in the middle of a stream."""
    narrow, wide = make_adapter(), make_adapter().double()
    for _ in range(2):
        expected = narrow(images)
        answer = wide(images.double())
        _expect(answer.dtype == torch.float64, f"after double() logits are {answer.dtype}")
        _expect(torch.allclose(answer.float(), expected, rtol=1e-2, atol=1e-2), "double() changed the answers")
    moved = narrow.double()
    moved(images.double())
    moved.float().reset()
    _expect(_equal(moved(images), make_adapter()(images)), "reset after double() and float() is not exact")


def check_predict_changes_nothing(make_adapter: MakeAdapter, images: Tensor) -> None:
    """`predict` answers and leaves everything as it was."""
    adapter = make_adapter()
    adapter(images)
    before, counters = _snapshot(adapter), copy.copy(adapter.counters)
    first, second = adapter.predict(images), adapter.predict(images)
    _expect(_equal(first, second), "predict answered the same images differently")
    _expect_state(adapter, before, "predict changed")
    _expect(adapter.counters == counters, "predict was counted as adapting")


def check_save_and_load(make_adapter: MakeAdapter, images: Tensor) -> None:
    """A saved adapter continues exactly where it was, in another process or in this one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        adapter = make_adapter()
        adapter(images)
        adapter(images.flip(0))
        size = adapter.save(path)
        _expect(size == path.stat().st_size, f"save said {size} bytes, the file has {path.stat().st_size}")
        resumed = make_adapter()
        resumed.load(path)
        _expect(resumed.counters == adapter.counters, "counters were not saved")
        for _ in range(2):
            _expect(_equal(adapter(images), resumed(images)), "the loaded adapter does not go on where it was")
        resumed.reset()
        _expect(_equal(resumed(images), make_adapter()(images)), "reset after load is not exact")


def check_copies_are_independent(make_adapter: MakeAdapter, images: Tensor) -> None:
    """A deep copy continues like the original, and neither disturbs the other."""
    adapter = make_adapter()
    adapter(images)
    twin = copy.deepcopy(adapter)
    expected = adapter(images)
    _expect(_equal(twin(images), expected), "a copy answers differently")


def check_export_answers_alike(make_adapter: MakeAdapter, images: Tensor) -> None:
    """The exported model is an ordinary one with the answers of `predict`, or the method says why there is none."""
    adapter = make_adapter()
    for _ in range(2):
        adapter(images)
    try:
        model = adapter.export()
    except ValueError as error:
        _expect(bool(str(error)), "export was refused without a reason")
        return
    _expect(not isinstance(model, (Adapter, SplitClassifier)), f"export gave a {type(model).__name__}")
    unmixed = adapter.normaliser.unmixer is not None  # answers each image with statistics of its own
    before = _snapshot(adapter)
    with torch.no_grad():
        ours, theirs = model(images).softmax(1), adapter.predict(images).softmax(1)
    close = torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    _expect(unmixed or close, "the exported model answers differently")
    for tensor in model.state_dict().values():
        tensor.zero_()
    _expect_state(adapter, before, "the exported model shares")


def check_bad_batches_change_nothing(make_adapter: MakeAdapter, images: Tensor) -> None:
    """NaN, infinite, empty, of another kind or shape: a clear error, and the next good batch notices nothing."""
    adapter, undisturbed = make_adapter(), make_adapter()
    adapter(images), undisturbed(images)
    before, counters = _snapshot(adapter), copy.copy(adapter.counters)
    nan, infinite = images.clone(), images.clone()
    nan[0].view(-1)[0], infinite[-1].view(-1)[-1] = math.nan, math.inf
    bad: dict[str, object] = {
        "NaN": nan,
        "infinite": infinite,
        "empty": images[:0],
        "uint8": images.mul(50).byte(),
        "float16": images.half(),
        "a list": images.tolist(),
        "one value": images.flatten()[0],
        "other channels": images.repeat_interleave(2, dim=1),
    }
    for name, batch in bad.items():
        try:
            adapter(batch)
        except (TypeError, ValueError) as error:
            _expect(len(str(error)) > 20, f"{name}: the error does not say what was wrong: {error}")
        else:
            raise AssertionError(f"{name}: a bad batch was accepted")
        _expect_state(adapter, before, f"a bad batch ({name}) changed")
    _expect(adapter.counters == counters, "bad batches were counted")
    _expect(_equal(adapter(images), undisturbed(images)), "a bad batch left traces")


def check_every_batch_size(make_adapter: MakeAdapter, images: Tensor) -> None:
    """Batches of any size are answered, also changing ones; a single image is answered, or refused with a reason."""
    adapter = make_adapter()
    for size in (len(images), 3, 2, len(images), 5):
        logits = adapter(images[:size])
        _expect(len(logits) == size and bool(torch.isfinite(logits).all()), f"a batch of {size} was not answered")
    try:
        _expect(len(adapter(images[:1])) == 1, "a single image was not answered")
    except ValueError as error:
        _expect(len(str(error)) > 20, f"a single image was refused without a reason: {error}")


def check_constant_images(make_adapter: MakeAdapter, images: Tensor) -> None:
    """Black frames, all the same, neither stop the stream nor leave anything that is not finite."""
    adapter = make_adapter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StepRefused)
        for _ in range(3):
            adapter(torch.zeros_like(images))
    for name, tensor in adapter.state().items():
        _expect(
            bool(torch.isfinite(tensor.double()).all()), f"black frames left `{name}` with values that are not finite"
        )
    _expect(bool(torch.isfinite(adapter(images)).all()), "after black frames the answers are not finite")


def check_refuses_steps_that_are_not_finite(make_adapter: MakeAdapter, images: Tensor) -> None:
    """Images so large that features overflow are reported, and leave the weights as they were."""
    adapter = make_adapter()
    adapter(images)
    before = _snapshot(adapter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter(images / images.abs().max() * 3e38)
    assert adapter.report is not None
    if adapter.report.refused:
        _expect(any(issubclass(w.category, StepRefused) for w in caught), "a refused step gave no warning")
        _expect(len(adapter.report.reason) > 10, "a refused step gave no reason")
        _expect_state(adapter, before, "a refused step changed")
    for name, tensor in adapter.state().items():
        _expect(bool(torch.isfinite(tensor.double()).all()), f"`{name}` is not finite after an overflow")


def check_memory_is_bounded(make_adapter: MakeAdapter, images: Tensor) -> None:
    """What an adapter keeps does not grow with the length of the stream."""
    adapter = make_adapter()
    sizes = []
    for _ in range(3):
        for number in range(8):
            adapter(images.roll(number, 0) * (1 + 0.01 * number))
        sizes.append(sum(tensor.numel() for tensor in adapter.state().values()))
    _expect(sizes[1] == sizes[2] or sizes[2] <= 2 * sizes[0], f"the state grows with the stream: {sizes} values")


ALL: tuple[Callable[[MakeAdapter, Tensor], None], ...] = (
    check_answers_with_logits,
    check_source_untouched,
    check_input_untouched,
    check_reset_is_exact,
    check_same_images_same_logits,
    check_works_under_no_grad,
    check_ignores_train_and_eval,
    check_follows_to,
    check_predict_changes_nothing,
    check_save_and_load,
    check_copies_are_independent,
    check_export_answers_alike,
    check_bad_batches_change_nothing,
    check_every_batch_size,
    check_constant_images,
    check_refuses_steps_that_are_not_finite,
    check_memory_is_bounded,
)


def _expect(good: bool, otherwise: str) -> None:
    if not good:  # not an assert statement: these checks must also work under python -O
        raise AssertionError(otherwise)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _snapshot(adapter: Adapter) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in adapter.state().items()}


def _expect_state(adapter: Adapter, before: dict[str, Tensor], what: str) -> None:
    now = adapter.state()
    _expect(now.keys() == before.keys(), f"{what} other tensors: {sorted(now.keys() ^ before.keys())[:3]}")
    for name, tensor in before.items():
        _expect(_equal(tensor, now[name].detach()), f"{what} `{name}`")
