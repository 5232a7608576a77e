"""Ten runs of two ranks each, that end as processes end. Forked from one that has imported everything: that is slow."""

import gc
import os
import socket
import sys

import torch
from torch import nn

import cafe_tta as cafe

RUNS = 10


def run(rank: int) -> None:
    """One rank: joins, adapts, leaves."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    with cafe.distributed.joined(timeout=120):
        adapter = cafe.create("infomax", cafe.split_classifier(network))
        adapter(torch.randn(4, 3, 6, 6))


def main() -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0).step()  # imports what torch puts off
    gc.freeze()  # a rank that ends does not sweep what it has from here
    for number in range(RUNS):
        # A port that was free a moment ago: in earnest, torchrun finds one.
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                run(rank)
                return  # through the interpreter's own end, where aborts happen
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if codes != [0, 0]:
            sys.exit(f"run {number} ended with {codes}")
    print(f"{RUNS} runs, no abort")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
