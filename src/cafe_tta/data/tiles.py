"""Small pictures of images, for contact sheets."""

import io
from typing import TYPE_CHECKING

import numpy as np

from cafe_tta.data.imageset import Images

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont, ImageFont

TILE, LARGE_TILE = 88, 128  # pixels, about: small images are enlarged by whole factors
GAP, MARGIN = 3, 20
PAPER, INK, FAINT, EMPTY = (255, 255, 255), (30, 30, 30), (120, 120, 120), (228, 228, 228)


def tile_side(image: Images) -> int:
    """The side of the tiles that suits images like this one."""
    short = min(image.shape[:2])
    return LARGE_TILE if short > TILE else short * round(TILE / short)


def tile(image: Images | None, side: int) -> "Picture":
    """The central square of an image. Small pixels stay pixels."""
    from PIL import Image

    if image is None:
        return Image.new("RGB", (side, side), EMPTY)
    height, width = image.shape[:2]
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    square = Image.fromarray(np.ascontiguousarray(image[top : top + short, left : left + short]))
    how = Image.Resampling.NEAREST if 2 * short <= side else Image.Resampling.LANCZOS
    return square.resize((side, side), how)


def font(size: int) -> "FreeTypeFont | ImageFont":
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except TypeError:  # Pillow 10.0 has only the small one
        return ImageFont.load_default()


def png(sheet: "Picture") -> bytes:
    """The content of a PNG file."""
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()
