"""The images of a request as the classifier wants them. Slow work, for threads beside the event loop."""

import numpy as np
import torch
from torch import Tensor

from cafe_tta.data.folder import decode_image
from cafe_tta.data.imageset import UnreadableImage
from cafe_tta.models import Preprocessing
from cafe_tta.serve.errors import bad_request
from cafe_tta.serve.protocol import InferRequest
from cafe_tta.serve.tensors import Content

FORMATS = ("JPEG", "PNG")
LARGEST = 1e6  # of preprocessed values: beyond, networks overflow


def prepare(request: InferRequest, preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    """float32 (n, 3, S, S)."""
    if request.pixels is None:
        return _decoded(request.files, preprocessing, max_pixels)
    pixels = request.pixels
    if pixels.dtype == np.uint8:
        height, width = pixels.shape[1:3]
        if height * width > max_pixels:
            raise bad_request(f"expected images of at most {max_pixels:,} pixels, but got {width} x {height}")
        return preprocessing(pixels)
    largest = np.abs(pixels).max()
    if not largest <= LARGEST:  # also where it is NaN
        what = "NaN or infinite ones" if not np.isfinite(largest) else f"{largest:g}"
        raise bad_request(f"expected finite, preprocessed values, at most {LARGEST:g}, but got {what}")
    if not pixels.flags.aligned or not pixels.flags.writeable or pixels.dtype != np.float32:
        pixels = np.array(pixels, np.float32)  # the JSON part before them may have any length
    return torch.from_numpy(pixels)


def _decoded(files: tuple[Content, ...], preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    size = preprocessing.size
    images = torch.empty(len(files), 3, size, size)
    for number, content in enumerate(files):  # one after the other: only one is ever held in its full size
        try:
            image = decode_image(content, max_pixels, FORMATS)
        except UnreadableImage as error:
            raise bad_request(f"image {number} is no JPEG or PNG that can be read: {error}") from None
        images[number] = preprocessing(image[None])[0]
    return images
