"""The round's other yardstick: Gloo's all-reduce between processes on this machine.

gloo_all_reduce.py WORKERS ELEMENTS REPEATS
Prints the seconds of each all-reduce of ELEMENTS float32 (the slowest worker's) in one line. Run with the Python of an
environment that has PyTorch."""
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, workers, elements, repeats, store):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    values = torch.ones(elements)
    times = []
    for _ in range(repeats + 1):  # The first one connects.
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        times.append(seconds.item())
    if rank == 0:
        print(*(f"{t:.6f}" for t in times[1:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    workers, elements, repeats = map(int, sys.argv[1:4])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (workers, elements, repeats, os.path.join(folder, "store")), nprocs=workers)
