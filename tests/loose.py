"""Options with which the images of small networks, whose predictions are never certain, are learnt from."""

_ENTROPY = {"max_entropy": 1.0, "max_similarity": 1.0}
LOOSE = {
    "eta": _ENTROPY,
    "eata": _ENTROPY,
    "rdumb": _ENTROPY,
    "sar": {"max_entropy": 1.0},
    "deyo": {"max_entropy": 1.0, "min_drop": -1.0},
}
