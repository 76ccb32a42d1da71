"""The trainer's yardstick: the same transformer in PyTorch, eager or compiled, on the CPU.

bench_trainer.py VOCAB WIDTH LAYERS HEADS KV_HEADS FFN SEQUENCE BATCH THREADS eager|compile
Prints "ready"; then, for every line with a number of seconds on its input, trains that long and prints the seconds of each
step in one line. Run with the Python of an environment that has PyTorch."""
import sys
import time

import torch
import torch.nn.functional as F

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, FFN, SEQUENCE, BATCH, THREADS = map(int, sys.argv[1:10])
HEAD_WIDTH = WIDTH // HEADS
torch.manual_seed(0)
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
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_WIDTH, bias=False)
        self.o = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = torch.nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = torch.nn.Linear(FFN, WIDTH, bias=False)
        self.norm1, self.norm2 = Norm(), Norm()

    def forward(self, x, cosine, sine):
        q, k, v = self.qkv(self.norm1(x)).split([WIDTH, KV_HEADS * HEAD_WIDTH, KV_HEADS * HEAD_WIDTH], dim=-1)
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
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
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


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE))
targets = torch.randint(0, VOCAB, (BATCH, SEQUENCE))
run = torch.compile(model) if sys.argv[10] == "compile" else model


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = run(tokens, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


# One thread is timed by the processor time that it gets, so that others on the machine do not count.
clock = time.process_time if THREADS == 1 else time.perf_counter
step()
step()
print("ready", flush=True)
for line in sys.stdin:
    end = time.perf_counter() + float(line)
    seconds = []
    while not seconds or time.perf_counter() < end:
        start = clock()
        step()
        seconds.append(clock() - start)
    print(*seconds[:1000], flush=True)
