"""What PyTorch's users have for a round: Gloo between processes on this machine, each with one thread.

gloo_rounds.py WORKERS ELEMENTS
Says `ready` once all are connected. Then each line on its input names one of

    all_reduce    an all-reduce of ELEMENTS float32, and nothing else
    sgd           the outer step of DiLoCo: delta = base - parameters, all-reduce of the deltas, base -= mean delta (SGD with rate 1),
                  parameters = base; every process has all of it
    nesterov      the same with Nesterov's momentum, rate 0.7 and momentum 0.9

and is answered by a line with the seconds of it (the slowest worker's) and the CPU seconds of all workers. Every tensor is kept,
every operation in place. In between the workers sleep. Ends with its input. Run with the Python of an environment that has
PyTorch."""
import os
import sys
import tempfile
import time

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # Large pages for large tensors.

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402


class Worker:
    def __init__(self, workers, elements):
        self.workers = workers
        self.parameters, self.base, self.delta, self.momentum = (torch.zeros(elements).fill_(0) for _ in range(4))

    def all_reduce(self):
        dist.all_reduce(self.delta)

    def mean_delta(self):
        """The sum over all: who uses it divides."""
        torch.sub(self.base, self.parameters, out=self.delta)
        dist.all_reduce(self.delta)

    def sgd(self):
        self.mean_delta()
        self.base.add_(self.delta, alpha=-1 / self.workers)
        self.parameters.copy_(self.base)

    def nesterov(self, rate=0.7, momentum=0.9):
        self.mean_delta()
        self.momentum.mul_(momentum).add_(self.delta, alpha=1 / self.workers)
        self.base.add_(self.delta, alpha=-rate / self.workers).add_(self.momentum, alpha=-rate * momentum)
        self.parameters.copy_(self.base)


FORMS = {"all_reduce": Worker.all_reduce, "sgd": Worker.sgd, "nesterov": Worker.nesterov}


def work(rank, workers, elements, store, orders, answers):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    worker = Worker(workers, elements)
    with torch.no_grad():
        for form in FORMS.values():  # The first one connects; all memory has been used once.
            form(worker)
        dist.barrier()
        answers.put((0.0, 0.0))
        while order := orders.get():
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            FORMS[order](worker)
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
        for line in sys.stdin:
            for queue in orders:
                queue.put(line.strip())
            times = [answers.get() for _ in range(workers)]
            print(f"{max(t[0] for t in times):.6f} {sum(t[1] for t in times):.6f}", flush=True)
        for queue in orders:
            queue.put("")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
