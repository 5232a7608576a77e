"""A contact sheet of the copies: corruptions down, severities across, a few images of each."""

from cafe_tta.copies.job import Job, Layout
from cafe_tta.data.imageset import Images, UnreadableImage, equally_spaced
from cafe_tta.data.tiles import FAINT, GAP, INK, MARGIN, PAPER, font, png, tile, tile_side

IMAGES = 2  # of every domain
GROUP_GAP = 14


def contact_sheet(job: Job, layout: Layout) -> bytes:
    """The content of a PNG file."""
    from PIL import Image, ImageDraw

    settings = job.settings
    rows = _readable_rows(job)
    side = tile_side(_clean(job, rows[0]))
    large, small = font(side // 5), font(side // 6)
    columns: list[int | None] = [None, *settings.severities]
    label = max(int(large.getlength(_title(name))) for name in settings.corruptions) + 16
    group = len(rows) * side + (len(rows) - 1) * GAP
    heading = 64
    width = 2 * MARGIN + label + len(columns) * group + (len(columns) - 1) * GROUP_GAP
    height = 2 * MARGIN + heading + len(settings.corruptions) * (side + GAP) - GAP
    sheet = Image.new("RGB", (max(width, 460), height), PAPER)
    draw = ImageDraw.Draw(sheet)
    facts = f"{settings.images} images, preset {settings.preset}, seed {settings.seed}"
    draw.text((MARGIN, MARGIN), facts, FAINT, small, "lt")
    for number, severity in enumerate(columns):
        left = MARGIN + label + number * (group + GROUP_GAP)
        title = "clean" if severity is None else f"severity {severity}" if group >= 80 else str(severity)
        draw.text((left + group / 2, MARGIN + heading - 10), title, INK, large, "ms")
        for line, corruption in enumerate(settings.corruptions):
            top = MARGIN + heading + line * (side + GAP)
            if number == 0:
                draw.text((MARGIN + label - 14, top + side / 2), _title(corruption), INK, large, "rm")
            for column, row in enumerate(rows):
                image = _clean(job, row) if severity is None else layout.read(job, row, corruption, severity)
                sheet.paste(tile(image, side), (left + column * (side + GAP), top))
    return png(sheet)


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


def _title(corruption: str) -> str:
    return corruption.replace("_", " ").replace("jpeg", "JPEG")
