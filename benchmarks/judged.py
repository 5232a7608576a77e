"""What judging the steps of an adapter costs, and what it is worth: the same stream with and without `Judged`.

    python benchmarks/judged.py
    python benchmarks/judged.py --method cafe

The test images are shown several times, each time in another order, corrupted in one way or in the 15 at random.
Accuracy in % of the answers in each pass, and seconds of CPU time. The flags are those of few_images.py.
"""

import time

import torch
from few_images import Setting, arguments, load

import cafe_tta as cafe


def play(setting: Setting, kind: str, passes: int, judged: bool) -> str:
    images = setting.model.preprocessing(setting.of_kind(kind, len(setting.pixels)))
    adapter = cafe.Judged(setting.adapter(), setting.stats) if judged else setting.adapter()
    found, began = [], time.process_time()
    for number in range(passes):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(number))
        right = 0
        for part in order.split(adapter.config.batch_size):
            right += int((adapter(images[part]).argmax(1) == setting.labels[part]).sum())
        found.append(f"{100 * right / len(images):.1f}")
    steps = f"{adapter.counters.steps} | {adapter.counters.rolled_back}"
    return f"{', '.join(found)} | {steps} | {time.process_time() - began:.1f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", default=["clean", "fog", "contrast", "gaussian_noise", "mixed"])
    parser.add_argument("--passes", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = load(args)
    print("| images | judged | accuracy % in each pass | steps | taken back | s |\n|---|---|---|---:|---:|---:|")
    for kind in args.kinds:
        for judged in (False, True):
            print(f"| {kind} | {'yes' if judged else ''} | {play(setting, kind, args.passes, judged)} |", flush=True)


if __name__ == "__main__":
    main()
