"""How soon the server's answers get better, by method: right answers to one camera in the dark, in order of arrival.

    python benchmarks/serve_methods.py --methods cafe cafe-plus

The embedded digits model serves dim and noisy test images as JPEG files, one a request, with the default settings.
The server waits for each step, so that figures do not depend on the clock. Labels score the answers here alone.
"""

import argparse
import io

import numpy as np
from PIL import Image

from cafe_tta import data
from cafe_tta.serve import build, load_settings

LIGHT, NOISE, QUALITY = 0.35, 25.0, 90  # factor on the pixels, standard deviation in 0..255, of JPEG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["cafe", "cafe-plus"])
    parser.add_argument("--images", type=int, default=750)
    parser.add_argument("--part", type=int, default=150, help="images that are scored together")
    args = parser.parse_args()
    digits = data.load("digits:test")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits))[: args.images]
    pictures = [in_the_dark(pixels, rng) for pixels in digits.images(order)]
    starts = range(0, len(order), args.part)
    print(f"| method |{''.join(f' {s + 1}–{min(s + args.part, len(order))} |' for s in starts)} steps |")
    print(f"|---|{'---:|' * (len(starts) + 1)}", flush=True)
    for method in args.methods:
        right, steps = score(method, pictures, np.asarray(digits.labels)[order])
        print(f"| `{method}` |{''.join(f' {right[s : s + args.part].sum()} |' for s in starts)} {steps} |", flush=True)


def in_the_dark(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    noisy = np.clip(pixels * LIGHT + rng.normal(0, NOISE, pixels.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
    return np.asarray(Image.open(file))


def score(method: str, pictures: list[np.ndarray], labels: np.ndarray) -> tuple[np.ndarray, int]:
    """Which answers were right, and how many steps were accepted."""
    built = build(load_settings({"method": method}))
    built.service.start()
    try:
        answers = []
        for pixels in pictures:
            image = built.model.preprocessing(pixels[None])
            answers.append(built.service.answer(image, cameras=["gate"], adapt=[True]).labels.item())
            built.service.settle()
        return np.array(answers) == labels, built.service.status()["steps"]["accepted"]
    finally:
        built.service.close()


if __name__ == "__main__":
    main()
