"""Adapting to a whole set of images, with the results in a folder; a run that was stopped continues where it was.

    model = models.load_classifier(ModelOptions("model.safetensors"))
    summary = FolderRun(model, adapter, data.load("photos/"), "out").run()

leaves predictions.csv, summary.json and state.safetensors in the folder.
"""

from cafe_tta.runs.folder import FolderRun, RunOptions, Stopped
from cafe_tta.runs.measure import Measurement, measure

__all__ = ["FolderRun", "Measurement", "RunOptions", "Stopped", "measure"]
