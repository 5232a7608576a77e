"""Diamond-square plasma: the cloud maps of the fog."""

import numpy as np

from .pixels import Floats


def wrapped(grids: Floats, after: bool) -> Floats:
    """Square grids with their first row and column once more at the end, or the last ones at the beginning."""
    count, points, _ = grids.shape
    larger = np.empty((count, points + 1, points + 1), np.float32)
    inside, edge, source = (slice(0, points), points, 0) if after else (slice(1, points + 1), 0, points)
    larger[:, inside, inside] = grids
    larger[:, edge, :] = larger[:, source, :]
    larger[:, :, edge] = larger[:, :, source]
    return larger


def plasma_maps(signed: Floats, side: int, decay: float) -> Floats:
    """(N, side, side) maps in 0..1 on a torus, from `signed` (N, side^2 - 1), uniform on -1..1.

    Starting from one point of height 0, each level puts a point in the centre of every square and then on the
    two kinds of edge midpoints: the mean of its four neighbours plus w * U(-w, w). Then w, at first 100, is
    divided by `decay`.
    """
    count = len(signed)
    corners = np.zeros((count, 1, 1), np.float32)
    wibble, used, quarter = 100.0, 0, np.float32(0.25)
    while (points := corners.shape[1]) < side:
        block = signed[:, used : used + 3 * points * points].reshape(count, 3, points, points)
        used += 3 * points * points
        noise = block * np.float32(wibble * wibble)
        ahead = wrapped(corners, after=True)
        here, below, beside = ahead[:, :-1, :-1], ahead[:, 1:, :-1], ahead[:, :-1, 1:]
        centres = quarter * (here + below + beside + ahead[:, 1:, 1:]) + noise[:, 0]
        behind = wrapped(centres, after=False)
        finer = np.empty((count, 2 * points, 2 * points), np.float32)
        finer[:, ::2, ::2] = corners
        finer[:, 1::2, 1::2] = centres
        finer[:, ::2, 1::2] = quarter * (here + beside + centres + behind[:, :-1, 1:]) + noise[:, 1]
        finer[:, 1::2, ::2] = quarter * (here + below + centres + behind[:, 1:, :-1]) + noise[:, 2]
        corners = finer
        wibble /= decay
    corners -= corners.min((1, 2), keepdims=True)
    corners /= corners.max((1, 2), keepdims=True)
    return corners
