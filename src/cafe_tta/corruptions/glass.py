"""Glass blur: blur, let pixels copy a random neighbour, blur again."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .pixels import Images, gaussian_smooth_all, truncate
from .randomness import random_below


def copy_sources(choices: npt.NDArray[np.intp], height: int, width: int, reach: int) -> npt.NDArray[np.intp]:
    """Which pixel each pixel holds after one pass of copying the chosen neighbours, (N * height * width,).

    The published loop runs over rows height - reach down to reach + 1 and columns likewise. It means to swap
    with the neighbour, but on numpy views the pixel is overwritten and the neighbour stays. A neighbour that
    lies further on in the image has itself been overwritten before, so the copy is followed from there.
    """
    count, rows, columns = choices.shape
    pixels = np.arange(count * height * width).reshape(count, height, width)
    inside = np.s_[:, reach + 1 : reach + 1 + rows, reach + 1 : reach + 1 + columns]
    down, right = np.divmod(np.arange(4 * reach * reach), 2 * reach)
    jumps = (down - reach) * width + (right - reach)  # offsets -reach .. reach - 1, the upper end left out
    target = jumps.take(choices)
    goes_on = target > 0
    target += pixels[inside]
    link = ~pixels  # ~p: the chain ends at pixel p; p: it goes on from there
    link[inside] = np.where(goes_on, target, ~target)
    flat = link.ravel()
    pending = np.flatnonzero(flat >= 0)
    while len(pending):  # each round doubles the stride, so 3 to 5 rounds do
        onward = flat.take(flat.take(pending))
        flat[pending] = onward
        pending = pending[onward >= 0]
    return ~flat


def glass_blur(
    images: Images, streams: Iterable[np.random.Generator], sigma: float, reach: float, passes: float
) -> Images:
    """Gaussian blur, `passes` rounds of copying a neighbour at most `reach` away, Gaussian blur."""
    count, height, width, _ = images.shape
    reach, passes = int(reach), int(passes)
    shape = (passes, height - 2 * reach, width - 2 * reach)
    choices = np.empty((count, *shape), np.intp)
    for row, stream in zip(choices, streams, strict=True):
        row[:] = random_below(stream, 4 * reach * reach, row.size).reshape(shape)
    source = copy_sources(choices[:, 0], height, width, reach)
    for k in range(1, passes):
        source = source.take(copy_sources(choices[:, k], height, width, reach))
    blurred = truncate(gaussian_smooth_all(images, sigma))
    shuffled = blurred.reshape(-1, 3).take(source, axis=0).reshape(images.shape)
    return truncate(gaussian_smooth_all(shuffled, sigma))
