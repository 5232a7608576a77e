"""What is not worth adapting to, seen from the pixels alone: flat frames, and images that came before."""

from dataclasses import dataclass

import torch
from torch import Tensor

FLAT = 0.01  # spread of a flat frame's values; those of ordinary, normalised images are about 1
SIDE = 8  # pixels of the thumbnail that says whether two images are the same
LEVELS = 4.0  # steps of the thumbnail's values in one standard deviation of the image


@dataclass(frozen=True)
class Screened:
    """Of each image: whether it is flat, and a number that equal images share."""

    flat: list[bool]
    fingerprints: list[int]


def screen(images: Tensor) -> Screened:
    """Looks at a batch of images, (B, C, H, W) or any other shape."""
    with torch.no_grad():
        batch = images.detach().float()
        values = batch.flatten(2) if batch.dim() > 2 else batch[:, None, :]  # (B, C, pixels)
        flat = values.std(-1, correction=0).amax(1) < FLAT
        whole = values.flatten(1)
        mean, std = whole.mean(1), whole.std(1, correction=0).clamp(min=1e-6)
        small = torch.nn.functional.adaptive_avg_pool2d(batch, SIDE).flatten(1) if batch.dim() == 4 else whole
        levels = ((small - mean[:, None]) / std[:, None] * LEVELS).round().clamp(-127, 127).to(torch.int8)
        rows = levels.cpu().numpy()
    return Screened(flat.tolist(), [hash(row.tobytes()) for row in rows])
