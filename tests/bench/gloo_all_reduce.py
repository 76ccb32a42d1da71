"""The round's other yardstick: Gloo's all-reduce between processes on this machine.

gloo_all_reduce.py WORKERS ELEMENTS
Says `ready` once all are connected. Then each line on its input makes one all-reduce of ELEMENTS float32, answered by a
line with the seconds of it (the slowest worker's) and the CPU seconds of all workers. In between the workers sleep. Ends
with its input. Run with the Python of an environment that has PyTorch."""
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, workers, elements, store, orders, answers):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    values = torch.ones(elements)
    dist.all_reduce(values)  # The first one connects.
    dist.barrier()
    answers.put((0.0, 0.0))
    while orders.get():
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        dist.all_reduce(values)
        answers.put((time.perf_counter() - start, time.process_time() - cpu))
    dist.destroy_process_group()


def main(workers, elements):
    context = mp.get_context("fork")  # PyTorch, loaded once, has no threads yet.
    answers = context.SimpleQueue()
    orders = [context.SimpleQueue() for _ in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        for rank in range(workers):
            arguments = (rank, workers, elements, store, orders[rank], answers)
            context.Process(target=work, args=arguments, daemon=True).start()
        for _ in range(workers):
            answers.get()
        print("ready", flush=True)
        for _ in sys.stdin:
            for queue in orders:
                queue.put(True)
            times = [answers.get() for _ in range(workers)]
            print(f"{max(t[0] for t in times):.6f} {sum(t[1] for t in times):.6f}", flush=True)
        for queue in orders:
            queue.put(False)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
