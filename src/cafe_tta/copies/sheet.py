"""A contact sheet of the copies: corruptions down, severities across, a few images of each."""

import io
from typing import TYPE_CHECKING

import numpy as np

from cafe_tta.copies.job import Job, Layout
from cafe_tta.data.imageset import Images, UnreadableImage, equally_spaced

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont, ImageFont

IMAGES = 2  # of every domain
TILE, LARGE_TILE = 88, 128  # pixels, about: small images are enlarged by whole factors
GAP, GROUP_GAP, MARGIN = 3, 14, 20
PAPER, INK, FAINT, EMPTY = (255, 255, 255), (30, 30, 30), (120, 120, 120), (228, 228, 228)


def contact_sheet(job: Job, layout: Layout) -> bytes:
    """The content of a PNG file."""
    from PIL import Image, ImageDraw

    settings = job.settings
    rows = _readable_rows(job)
    short = min(_clean(job, rows[0]).shape[:2])
    tile = LARGE_TILE if short > TILE else short * round(TILE / short)
    font, small = _font(tile // 5), _font(tile // 6)
    columns: list[int | None] = [None, *settings.severities]
    label = max(int(font.getlength(_title(name))) for name in settings.corruptions) + 16
    group = len(rows) * tile + (len(rows) - 1) * GAP
    heading = 64
    width = 2 * MARGIN + label + len(columns) * group + (len(columns) - 1) * GROUP_GAP
    height = 2 * MARGIN + heading + len(settings.corruptions) * (tile + GAP) - GAP
    sheet = Image.new("RGB", (max(width, 460), height), PAPER)
    draw = ImageDraw.Draw(sheet)
    facts = f"{settings.images} images, preset {settings.preset}, seed {settings.seed}"
    draw.text((MARGIN, MARGIN), facts, FAINT, small, "lt")
    for number, severity in enumerate(columns):
        left = MARGIN + label + number * (group + GROUP_GAP)
        title = "clean" if severity is None else f"severity {severity}" if group >= 80 else str(severity)
        draw.text((left + group / 2, MARGIN + heading - 10), title, INK, font, "ms")
        for line, corruption in enumerate(settings.corruptions):
            top = MARGIN + heading + line * (tile + GAP)
            if number == 0:
                draw.text((MARGIN + label - 14, top + tile / 2), _title(corruption), INK, font, "rm")
            for column, row in enumerate(rows):
                image = _clean(job, row) if severity is None else layout.read(job, row, corruption, severity)
                sheet.paste(_tile(image, tile), (left + column * (tile + GAP), top))
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _readable_rows(job: Job) -> list[int]:
    """A few images, from all over the set, that can be read."""
    rows: list[int] = []
    for start in equally_spaced(len(job.chosen), IMAGES).tolist():
        step = -1 if start else 1
        for row in list(range(start, len(job.chosen) if step > 0 else -1, step))[:50]:
            try:
                _clean(job, row)
            except UnreadableImage:
                continue
            if row not in rows:
                rows.append(row)
                break
    if not rows:
        raise ValueError(f"no image of {job.imageset.name} to draw could be read")
    return sorted(rows)


def _clean(job: Job, row: int) -> Images:
    image: Images = job.imageset.images([int(job.chosen[row])])[0]
    return image


def _tile(image: Images | None, side: int) -> "Picture":
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


def _title(corruption: str) -> str:
    return corruption.replace("_", " ").replace("jpeg", "JPEG")


def _font(size: int) -> "FreeTypeFont | ImageFont":
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except TypeError:  # Pillow 10.0 has only the small one
        return ImageFont.load_default()
