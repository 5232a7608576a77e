"""The corruptions once more: one image at a time, in float64, as plainly as possible.

Written from the description of the algorithms and sharing no code with the package, so that the tests compare
two independent works. Each function takes one image (H, W, 3), its published parameters and where its random
numbers come from: `Fresh` draws them as the published scripts do, `Replay` takes those that the package uses
for an image.
"""

import colorsys
import io
import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

from cafe_tta.corruptions import CORRUPTIONS
from cafe_tta.corruptions.randomness import Streams, random_below, random_signed

Picture = npt.NDArray[np.uint8]
Array = npt.NDArray[np.float64]
Row = tuple[float, ...]


class Draw(Protocol):
    def normal(self, shape: tuple[int, ...]) -> Array: ...
    def unit(self, shape: tuple[int, ...]) -> Array: ...
    def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> Array: ...
    def below(self, bound: int) -> int: ...
    def choices(self, bound: int, shape: tuple[int, ...]) -> npt.NDArray[np.int64]: ...


class Fresh:
    """Random numbers of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, shape: tuple[int, ...]) -> Array:
        return self.rng.normal(size=shape)

    def unit(self, shape: tuple[int, ...]) -> Array:
        return self.rng.random(shape)

    def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> Array:
        return self.rng.uniform(low, high, shape)

    def below(self, bound: int) -> int:
        return int(self.rng.integers(bound))

    def choices(self, bound: int, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        return self.rng.integers(bound, size=shape)


class Replay:
    """The random numbers of one image in the package."""

    def __init__(self, seed: int, name: str, severity: int, index: int) -> None:
        self.rng = next(iter(Streams(seed, CORRUPTIONS[name].id, severity, np.array([index]))))

    def normal(self, shape: tuple[int, ...]) -> Array:
        return self.rng.standard_normal(shape, np.float32).astype(np.float64)

    def unit(self, shape: tuple[int, ...]) -> Array:
        return random_signed(self.rng, math.prod(shape)).reshape(shape).astype(np.float64) / 2 + 0.5

    def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> Array:
        return self.rng.uniform(low, high, shape)

    def below(self, bound: int) -> int:
        return int(self.rng.integers(bound))

    def choices(self, bound: int, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        return random_below(self.rng, bound, math.prod(shape)).reshape(shape).astype(np.int64)


def cut(values: Array) -> Picture:
    """From 0..1 to 0..255 without the fraction; a trace more, so that whole numbers stay whole."""
    return (np.clip(values, 0, 1) * 255 + 1e-9).astype(np.uint8)


# Noises: only with fresh numbers, the package draws in another way.


def gaussian_noise(image: Picture, row: Row, draw: Draw) -> Picture:
    return cut(image / 255 + row[0] * draw.normal(image.shape))


def shot_noise(image: Picture, row: Row, draw: Draw) -> Picture:
    assert isinstance(draw, Fresh)
    return cut(draw.rng.poisson(image / 255 * row[0]) / row[0])


def impulse_noise(image: Picture, row: Row, draw: Draw) -> Picture:
    hit = draw.unit(image.shape) < row[0]
    return np.where(hit, np.where(draw.unit(image.shape) < 0.5, 255, 0), image).astype(np.uint8)


def speckle_noise(image: Picture, row: Row, draw: Draw) -> Picture:
    return cut(image / 255 * (1 + row[0] * draw.normal(image.shape)))


# Blurs.


def smooth(values: Array, sigma: float) -> Array:
    """Gaussian blur over rows and columns, edges repeated."""
    sigmas = (sigma, sigma, 0)[: values.ndim]
    return np.asarray(ndimage.gaussian_filter(values, sigmas, mode="nearest", truncate=4))


def defocus_blur(image: Picture, row: Row, draw: Draw) -> Picture:
    radius, sigma = row
    reach, window = (8, 1) if radius <= 8 else (int(radius), 2)
    side = 2 * reach + 1
    disk = np.zeros((side, side))
    for y in range(side):
        for x in range(side):
            disk[y, x] = (y - reach) ** 2 + (x - reach) ** 2 <= radius**2
    taps = np.array([math.exp(-(i**2) / (2 * sigma**2)) for i in range(-window, window + 1)])
    taps /= taps.sum()
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(taps, taps), mode="mirror")
    return cut(ndimage.correlate(image / 255, kernel[:, :, None], mode="mirror"))


def glass_blur(image: Picture, row: Row, draw: Draw) -> Picture:
    sigma, d, passes = row[0], int(row[1]), int(row[2])
    height, width, _ = image.shape
    pixels = cut(smooth(image / 255, sigma)).tolist()
    choice = draw.choices(4 * d * d, (passes, height - 2 * d, width - 2 * d)).tolist()
    for i in range(passes):
        for h in range(height - d, d, -1):
            for w in range(width - d, d, -1):
                dy, dx = divmod(choice[i][h - d - 1][w - d - 1], 2 * d)
                pixels[h][w] = pixels[h + dy - d][w + dx - d]
    return cut(smooth(np.array(pixels) / 255, sigma))


def smear(values: Array, radius: float, sigma: float, angle: float) -> Array:
    """One-sided motion blur."""
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * int(radius) + 1)]
    total = np.zeros_like(values)
    rows, columns = np.arange(values.shape[0]), np.arange(values.shape[1])
    for i, weight in enumerate(weights):
        dx = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        dy = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        y = np.clip(rows + dy, 0, len(rows) - 1)
        x = np.clip(columns + dx, 0, len(columns) - 1)
        total += weight / sum(weights) * values[y][:, x]
    return total


def motion_blur(image: Picture, row: Row, draw: Draw) -> Picture:
    angle = float(draw.uniform(-45, 45, (1,))[0])
    return cut(smear(image / 255, row[0], row[1], angle))


def enlarge(values: Array, factor: float) -> Array:
    """Zoom into the centre of (H, W, C), same size; each axis by itself."""
    height, width = values.shape[:2]
    rows, columns = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - rows) // 2, (width - columns) // 2
    zoomed = ndimage.zoom(values[top : top + rows, left : left + columns], (factor, factor, 1), order=1)
    top, left = (zoomed.shape[0] - height) // 2, (zoomed.shape[1] - width) // 2
    return np.asarray(zoomed[top : top + height, left : left + width])


def zoom_blur(image: Picture, row: Row, draw: Draw) -> Picture:
    total, factors = image / 255, np.arange(*row)
    for factor in factors:
        total = total + enlarge(image / 255, factor)
    return cut(total / (len(factors) + 1))


def gaussian_blur(image: Picture, row: Row, draw: Draw) -> Picture:
    return cut(smooth(image / 255, row[0]))


# Weather.


def snow(image: Picture, row: Row, draw: Draw) -> Picture:
    mean, std, zoom, threshold, radius, sigma, mix = row
    height, width, _ = image.shape
    rows, columns = math.ceil(height / zoom), math.ceil(width / zoom)
    top, left = (height - rows) // 2, (width - columns) // 2
    layer = np.zeros((height, width, 1))
    layer[top : top + rows, left : left + columns, 0] = mean + std * draw.normal((rows, columns))
    layer = enlarge(layer, zoom)[..., 0]
    layer[layer < threshold] = 0
    angle = float(draw.uniform(-135, -45, (1,))[0])
    flakes = cut(smear(cut(layer) / 255, radius, sigma, angle))[..., None] / 255
    x = image / 255
    grey = (0.299 * x[..., 0] + 0.587 * x[..., 1] + 0.114 * x[..., 2])[..., None]
    x = mix * x + (1 - mix) * np.maximum(x, 1.5 * grey + 0.5)
    return cut(x + flakes + flakes[::-1, ::-1])


@lru_cache
def frost_textures(rescale: float) -> list[Array]:
    """The published five, from the installed files (without the third, which equals the second)."""
    spec = find_spec("torch_uncertainty_assets")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "frost"
    found = []
    for number in (1, 2, 2, 3, 4):
        with Image.open(folder / f"frost{number}.jpg") as file:
            texture = np.asarray(file).astype(np.float64)
        if rescale != 1:
            sides = [round(side * rescale) for side in texture.shape[:2]]
            grids = [
                np.clip((np.arange(new) + 0.5) / rescale - 0.5, 0, old - 1)
                for new, old in zip(sides, texture.shape, strict=False)
            ]
            where = np.meshgrid(*grids, indexing="ij")
            planes = [ndimage.map_coordinates(texture[..., c], where, order=1) for c in range(3)]
            texture = np.round(np.stack(planes, axis=-1))
        found.append(texture)
    return found


def frost(image: Picture, row: Row, draw: Draw) -> Picture:
    texture = frost_textures(row[2])[draw.below(5)]
    height, width, _ = image.shape
    top, left = draw.below(texture.shape[0] - height), draw.below(texture.shape[1] - width)
    return cut((row[0] * image + row[1] * texture[top : top + height, left : left + width]) / 255)


def plasma(side: int, decay: float, draw: Draw) -> Array:
    """Diamond-square on a torus, point by point."""
    noise = iter((2 * draw.unit((side * side - 1,)) - 1).tolist())
    grid = [[0.0] * side for _ in range(side)]
    step, wibble = side, 100.0
    while step >= 2:
        half, points = step // 2, side // step
        families = [
            (half, half, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (0, half, ((0, -half), (0, half), (-half, 0), (half, 0))),
            (half, 0, ((0, -half), (0, half), (-half, 0), (half, 0))),
        ]
        for top, left, neighbours in families:
            for i in range(points):
                y = top + i * step
                for j in range(points):
                    x = left + j * step
                    total = 0.0
                    for dy, dx in neighbours:
                        total += grid[(y + dy) % side][(x + dx) % side]
                    grid[y][x] = total / 4 + wibble * wibble * next(noise)
        step, wibble = half, wibble / decay
    heights = np.array(grid)
    return np.asarray((heights - heights.min()) / (heights.max() - heights.min()))


def fog(image: Picture, row: Row, draw: Draw) -> Picture:
    strength, decay, side = row
    height, width, _ = image.shape
    x = image / 255
    brightest = x.max()
    x = x + strength * plasma(int(side), decay, draw)[:height, :width, None]
    return cut(x * brightest / (brightest + strength))


def through_hsv(image: Picture, change: tuple[int, float, float]) -> Picture:
    """Channel number of HSV, to be multiplied by a factor and raised by an offset."""
    number, factor, offset = change
    result = np.empty(image.shape)
    for place in np.ndindex(image.shape[:2]):
        hsv = list(colorsys.rgb_to_hsv(*(image[place] / 255).tolist()))
        hsv[number] = min(max(hsv[number] * factor + offset, 0), 1)
        result[place] = colorsys.hsv_to_rgb(*hsv)
    return cut(result)


def brightness(image: Picture, row: Row, draw: Draw) -> Picture:
    return through_hsv(image, (2, 1, row[0]))


def saturate(image: Picture, row: Row, draw: Draw) -> Picture:
    return through_hsv(image, (1, row[0], row[1]))


# Digital.


def contrast(image: Picture, row: Row, draw: Draw) -> Picture:
    x = image / 255
    mean = x.mean((0, 1))
    return cut((x - mean) * row[0] + mean)


def elastic_transform(image: Picture, row: Row, draw: Draw) -> Picture:
    alpha, sigma, jitter = row
    height, width, _ = image.shape
    cx, cy, q = width // 2, height // 2, min(height, width) // 3
    anchors = np.array([(cx + q, cy + q), (cx + q, cy - q), (cx - q, cy - q)], np.float64)
    moved = anchors + draw.uniform(-jitter, jitter, (3, 2))
    # The pixel at (x, y) of the result comes from [x, y, 1] @ back of the image.
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), anchors)
    y, x = np.mgrid[:height, :width]
    places = np.stack([x, y, np.ones_like(x)], axis=-1) @ back
    planes = [
        ndimage.map_coordinates(image[..., c] / 255, (places[..., 1], places[..., 0]), order=1, mode="mirror")
        for c in range(3)
    ]
    if alpha:
        fields = 2 * draw.unit((height, width, 2)) - 1
        dx, dy = (alpha * ndimage.gaussian_filter(fields[..., i], sigma, mode="reflect", truncate=3) for i in (0, 1))
        planes = [ndimage.map_coordinates(plane, (y + dy, x + dx), order=1, mode="reflect") for plane in planes]
    return cut(np.stack(planes, axis=-1))


def box_resize(values: npt.NDArray[np.int64], side: int) -> npt.NDArray[np.int64]:
    """Pillow's BOX along the first axis: mean of the pixels whose centres lie in the window, rounded."""
    scale = len(values) / side
    reach = max(scale, 1) / 2
    result = []
    for i in range(side):
        centre = (i + 0.5) * scale
        first, last = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), len(values))
        result.append(np.floor(values[first:last].mean(0) + 0.5))
    return np.array(result).astype(np.int64)


def pixelate(image: Picture, row: Row, draw: Draw) -> Picture:
    height, width, _ = image.shape
    values = image.astype(np.int64)
    for rows, columns in ((int(height * row[0]), int(width * row[0])), (height, width)):
        values = box_resize(values.swapaxes(0, 1), columns).swapaxes(0, 1)  # columns first, as Pillow
        values = box_resize(values, rows)
    return values.astype(np.uint8)


def jpeg_compression(image: Picture, row: Row, draw: Draw) -> Picture:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=int(row[0]))
    return np.asarray(Image.open(file))


def spatter(image: Picture, row: Row, draw: Draw) -> Picture:
    """Canny, distance transform and histogram equalisation are OpenCV's: they define the corruption."""
    mean, std, sigma, threshold, strength, mud = row
    x = image / 255
    liquid = smooth(mean + std * draw.normal(image.shape[:2]), sigma)
    liquid[liquid < threshold] = 0
    if mud:
        mask = smooth((liquid > threshold).astype(np.float64), strength)
        mask[mask < 0.8] = 0
        return cut(x * (1 - mask[..., None]) + mask[..., None] * np.array([63, 42, 20]) / 255)
    drops = (liquid * 255).astype(np.uint8)
    distance = cv2.distanceTransform(255 - cv2.Canny(drops, 50, 150), cv2.DIST_L2, 5)
    depth = ndimage.uniform_filter(np.minimum(distance, 20).astype(np.float64), 3, mode="mirror")
    relief = cv2.equalizeHist((depth + 1e-6).astype(np.uint8)).astype(np.float64)
    emboss = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    relief = np.clip(ndimage.correlate(relief, emboss, mode="mirror"), 0, 255)
    mask = drops * np.round(ndimage.uniform_filter(relief, 3, mode="mirror"))
    if mask.max() > 0:
        mask = mask / mask.max() * strength
    return cut(x + mask[..., None] * np.array([175, 238, 238]) / 255)
