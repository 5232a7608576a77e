"""Corrupted copies of an image set on disk, made by several processes; a stopped job continues where it was.

>>> import tempfile
>>> from cafe_tta import copies, data
>>> with tempfile.TemporaryDirectory() as folder:
...     made = copies.make(data.load("digits:test"), f"{folder}/c", corruptions="fog", severities=5, limit=4)
...     data.load(f"cifar10-c:fog-5@{folder}/c").images([0, 1]).shape
(2, 32, 32, 3)

Every copy depends on the settings and on the index of its image in the set alone, never on how the work was divided.
A finished file has its final name; unfinished ones are in a hidden folder beside it, which is removed in the end.
"""

from cafe_tta.copies.job import PROCEDURAL_FROST as PROCEDURAL_FROST
from cafe_tta.copies.job import CopyOptions as CopyOptions
from cafe_tta.copies.job import Job as Job
from cafe_tta.copies.job import Settings as Settings
from cafe_tta.copies.job import choose_severities as choose_severities
from cafe_tta.copies.job import plan as plan
from cafe_tta.copies.run import Copies as Copies
from cafe_tta.copies.run import carry_out as carry_out
from cafe_tta.copies.run import make as make
