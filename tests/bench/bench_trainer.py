"""The trainer's yardstick: the same transformer in PyTorch, eager and compiled, on the CPU.

bench_trainer.py FILE STEPS VOCAB WIDTH LAYERS HEADS KV_HEADS FFN SEQUENCE BATCH THREADS
FILE holds the initial weights (float32, in the order and shapes of transformers' Llama) and one batch (uint32: tokens, then
targets). For "eager" and for "compiled" a line: that word, and the losses of the first STEPS steps; no losses where there is no
compiler. Then, for every line "eager SECONDS" or "compiled SECONDS" on its input, trains that long and prints the seconds of each
step in one line. Run with the Python of an environment that has PyTorch."""
import sys
import time

import numpy
import torch
import torch.nn.functional as F

FILE = sys.argv[1]
STEPS, VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, FFN, SEQUENCE, BATCH, THREADS = map(int, sys.argv[2:12])
HEAD_WIDTH = WIDTH // HEADS
KV_WIDTH = KV_HEADS * HEAD_WIDTH
torch.set_num_threads(THREADS)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-5)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.qkv = torch.nn.Linear(WIDTH, WIDTH + 2 * KV_WIDTH, bias=False)
        self.o = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = torch.nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = torch.nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x, cosine, sine):
        q, k, v = self.qkv(self.norm1(x)).split([WIDTH, KV_WIDTH, KV_WIDTH], dim=-1)
        q = rotate(q.view(BATCH, SEQUENCE, HEADS, HEAD_WIDTH).transpose(1, 2), cosine, sine)
        k = rotate(k.view(BATCH, SEQUENCE, KV_HEADS, HEAD_WIDTH).transpose(1, 2), cosine, sine)
        v = v.view(BATCH, SEQUENCE, KV_HEADS, HEAD_WIDTH).transpose(1, 2)
        if KV_HEADS != HEADS:
            k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
            v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(BATCH, SEQUENCE, WIDTH))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cosine, sine):
    a, b = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-b, a), dim=-1) * sine


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        angle = torch.outer(torch.arange(SEQUENCE), 10000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH))
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def read_start():
    """The weights as a state for Model, and the batch."""
    numbers = numpy.fromfile(FILE, dtype=numpy.float32)
    at = 0

    def take(rows, columns=None):
        nonlocal at
        count = rows * (columns or 1)
        part = torch.from_numpy(numbers[at:at + count].copy())
        at += count
        return part if columns is None else part.view(rows, columns)

    state = {"embed.weight": take(VOCAB, WIDTH)}
    for i in range(LAYERS):
        name = f"layers.{i}."
        state[name + "norm1.weight"] = take(WIDTH)
        state[name + "qkv.weight"] = take(WIDTH + 2 * KV_WIDTH, WIDTH)  # Three tensors, one after the other.
        state[name + "o.weight"] = take(WIDTH, WIDTH)
        state[name + "norm2.weight"] = take(WIDTH)
        state[name + "gate_up.weight"] = take(2 * FFN, WIDTH)
        state[name + "down.weight"] = take(WIDTH, FFN)
    state["norm.weight"] = take(WIDTH)
    batch = torch.from_numpy(numbers[at:].view(numpy.int32).astype(numpy.int64)).view(2, BATCH, SEQUENCE)
    return state, batch[0].contiguous(), batch[1].contiguous()


class Trainer:
    def __init__(self, state, tokens, targets, compiled):
        self.model = Model()
        self.model.load_state_dict(state, strict=False)  # Cosine and sine are its own.
        gains = [p for p in self.model.parameters() if p.dim() == 1]
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        self.optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0}],
                                           lr=1e-4, fused=True)
        self.run = torch.compile(self.model) if compiled else self.model
        self.tokens, self.targets = tokens, targets

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.run(self.tokens, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main():
    start = read_start()
    trainers = {}
    for name in "eager", "compiled":
        trainers[name] = Trainer(*start, name == "compiled")
        try:
            losses = [trainers[name].step() for _ in range(STEPS)]
        except Exception as error:  # pylint: disable=broad-except
            if name == "eager":
                raise
            print(f"torch.compile: {error}"[:300], file=sys.stderr)
            losses = []
        print(name, *losses, flush=True)
    # One thread is timed by the processor time that it gets, so that others on the machine do not count.
    clock = time.process_time if THREADS == 1 else time.perf_counter
    for line in sys.stdin:
        name, length = line.split()
        end = time.perf_counter() + float(length)
        seconds = []
        while not seconds or time.perf_counter() < end:
            begin = clock()
            trainers[name].step()
            seconds.append(clock() - begin)
        print(*seconds[:1000], flush=True)


main()
