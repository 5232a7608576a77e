"""Pictures for the tests: smooth colours, fine texture, flat patches, black and white."""

import cv2
import numpy as np
import numpy.typing as npt


def picture(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    coarse = cv2.resize(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8), (width, height))
    image = np.clip(coarse.astype(int) + rng.integers(-12, 13, coarse.shape), 0, 255).astype(np.uint8)
    image[: height // 4, : width // 4] = rng.integers(0, 256, 3)
    image[: height // 4, -(width // 4) :] = 77
    image[-(height // 4) :, : width // 4] = 0
    image[-3:, -3:] = 255
    return image


def pictures(count: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    return np.stack([picture(height, width, seed) for seed in range(count)])
