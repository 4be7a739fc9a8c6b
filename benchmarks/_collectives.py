"""One rank of a measurement of the network: python _collectives.py RANK WORLD PORT BACKEND. Rank 0 prints JSON.

`all_reduce` is the number of bytes of a tensor that all ranks sum in a second, `all_to_all` the number of bytes that
each rank exchanges in a second, both for tensors of the sizes that training sends.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import distributed


def seconds_of(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest time of a collective operation, after one that is not measured."""
    shortest = float("inf")
    for repeat in range(1 + repeats):
        distributed.barrier()
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if repeat:
            shortest = min(shortest, time.perf_counter() - start)
    return shortest


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    distributed.init_process_group(sys.argv[4], init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if sys.argv[4] == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    gradients = torch.zeros(2**26, device=device)
    rows = torch.zeros(2048 // world * world, 512, dtype=torch.bfloat16, device=device)
    received = torch.empty_like(rows)
    rates = {
        "all_reduce": 4 * len(gradients) / seconds_of(lambda: distributed.all_reduce(gradients)),
        "all_to_all": 2 * rows.numel() / seconds_of(lambda: distributed.all_to_all_single(received, rows)),
    }
    if rank == 0:
        print(json.dumps(rates), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
