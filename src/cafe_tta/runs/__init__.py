"""Adapting to a whole set of images, with the results in a folder; a run that was stopped continues where it was.

    model = models.load_classifier(ModelOptions("model.safetensors"))
    summary = FolderRun(model, adapter, data.load("photos/"), "out").run()

leaves predictions.csv, summary.json and state.safetensors in the folder.
"""

from cafe_tta.runs.folder import FolderRun as FolderRun
from cafe_tta.runs.folder import RunOptions as RunOptions
from cafe_tta.runs.folder import Stopped as Stopped
from cafe_tta.runs.measure import Measurement as Measurement
from cafe_tta.runs.measure import measure as measure
