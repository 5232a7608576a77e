"""Diamond-square plasma: the cloud maps of the fog."""

import numpy as np

from .pixels import Floats


def plasma_maps(uniforms: Floats, side: int, decay: float) -> Floats:
    """(N, side, side) maps in 0..1 on a torus, from `uniforms` (N, side^2 - 1) in 0..1.

    Starting from one point of height 0, each level puts a point in the centre of every square and then on the two kinds
    of edge midpoints: the mean of its four neighbours plus w * U(-w, w). Then w, at first 100, is divided by `decay`.
    """
    count = len(uniforms)
    corners = np.zeros((count, 1, 1), np.float32)
    wibble, used = 100.0, 0
    while (points := corners.shape[1]) < side:
        block = uniforms[:, used : used + 3 * points * points].reshape(count, 3, points, points)
        used += 3 * points * points
        noise = (block - np.float32(0.5)) * np.float32(2 * wibble * wibble)
        below, beside = np.roll(corners, -1, 1), np.roll(corners, -1, 2)
        centres = (corners + below + beside + np.roll(below, -1, 2)) * np.float32(0.25) + noise[:, 0]
        finer = np.empty((count, 2 * points, 2 * points), np.float32)
        finer[:, ::2, ::2] = corners
        finer[:, 1::2, 1::2] = centres
        finer[:, ::2, 1::2] = (corners + beside + centres + np.roll(centres, 1, 1)) * np.float32(0.25) + noise[:, 1]
        finer[:, 1::2, ::2] = (corners + below + centres + np.roll(centres, 1, 2)) * np.float32(0.25) + noise[:, 2]
        corners = finer
        wibble /= decay
    corners -= corners.min((1, 2), keepdims=True)
    corners /= corners.max((1, 2), keepdims=True)
    return corners
