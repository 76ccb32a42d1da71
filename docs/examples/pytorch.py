#!/usr/bin/env python3
"""A PyTorch program as a learner: joins an ensemble through libdiloco, with nothing but ctypes.

    head -c 32 /dev/urandom | base64 > token
    diloco-syncer --job pytorch.yaml --shard 0 --listen 127.0.0.1:7000 --token-file token --state-dir state &
    export DILOCO_JOB=pytorch DILOCO_ENDPOINTS=ws://127.0.0.1:7000 DILOCO_TOKEN_FILE=token
    python3 pytorch.py & python3 pytorch.py & wait
    diloco-export --state-dir state --out final           # model.safetensors, with the names given here

Start as many as you like, kill some, start others: each goes on from the ensemble's parameters. On a cluster the operator sets
these variables (docs/kubernetes.md, crds/samples/pytorch.yaml). Own programs need what is marked with (*).

libdiloco reads and writes float32 in host memory, in diloco_join and diloco_step only. With the model on a GPU register copies in
host memory (pinned), copy parameters to them before diloco_step, and back where info.updates_applied is not 0.
"""
import ctypes
import os
import sys

import torch

DILOCO_CONTINUE, DILOCO_DONE, DILOCO_STOPPED = 0, 1, 2


class Options(ctypes.Structure):  # struct diloco_options
    _fields_ = [("struct_size", ctypes.c_uint32), ("job", ctypes.c_char_p), ("endpoints", ctypes.c_char_p),
                ("token", ctypes.c_char_p), ("ca_file", ctypes.c_char_p), ("cert_file", ctypes.c_char_p),
                ("key_file", ctypes.c_char_p), ("learner", ctypes.c_int32), ("uid", ctypes.c_char_p), ("role", ctypes.c_int),
                ("join_timeout_seconds", ctypes.c_double), ("trainer", ctypes.c_char_p), ("log", ctypes.c_void_p),
                ("log_context", ctypes.c_void_p), ("serve_listen", ctypes.c_char_p), ("serve_address", ctypes.c_char_p)]


class Info(ctypes.Structure):  # struct diloco_info
    _fields_ = [("learner", ctypes.c_uint32), ("step", ctypes.c_uint64), ("ensemble_step", ctypes.c_uint64),
                ("tokens_all", ctypes.c_uint64), ("token_budget", ctypes.c_uint64), ("learners", ctypes.c_uint32),
                ("connected_shards", ctypes.c_uint32), ("shards", ctypes.c_uint32), ("updates_applied", ctypes.c_uint32),
                ("updates_total", ctypes.c_uint64), ("pushes_total", ctypes.c_uint64), ("last_round", ctypes.c_uint64),
                ("bytes_sent", ctypes.c_uint64), ("bytes_received", ctypes.c_uint64), ("waited_seconds", ctypes.c_double),
                ("recovered_from", ctypes.c_int32), ("recovered_step", ctypes.c_uint64)]


class Error(ctypes.Structure):  # struct diloco_error
    _fields_ = [("code", ctypes.c_int), ("text", ctypes.c_char * 512)]


class Learner:
    """The parameters of a model as a learner of a job. Raises RuntimeError with what libdiloco says."""

    def __init__(self, model, library=os.environ.get("DILOCO_LIBRARY", "libdiloco.so")):
        env = os.environ
        self.lib, self.handle, self.info, self.error = ctypes.CDLL(library), ctypes.c_void_p(), Info(), Error()
        token = open(env["DILOCO_TOKEN_FILE"], encoding="ascii").readline().strip()
        options = Options(ctypes.sizeof(Options), env["DILOCO_JOB"].encode(), env["DILOCO_ENDPOINTS"].encode(), token.encode(),
                          learner=int(env.get("DILOCO_LEARNER", "-1")), uid=env.get("DILOCO_UID", "").encode() or None)
        self._check(self.lib.diloco_open(ctypes.byref(options), ctypes.byref(self.handle), ctypes.byref(self.error)))
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        for depth, (name, tensor) in enumerate(model.named_parameters()):  # (*) The same on every learner, in the same order.
            if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise RuntimeError(f"{name}: contiguous float32 in host memory is needed")
            shape = (ctypes.c_uint64 * tensor.dim())(*tensor.shape)
            self._check(self.lib.diloco_register(self.handle, name.encode(), ctypes.c_void_p(tensor.data_ptr()), tensor.dim(), shape,
                                                 int(id(tensor) in embeddings), ctypes.c_uint32(depth), ctypes.byref(self.error)))

    def _check(self, result):
        if result < 0:
            raise RuntimeError(self.error.text.decode())
        return result == DILOCO_CONTINUE

    def join(self):
        """(*) Waits for the ensemble's parameters, which replace the model's. False: the job is over."""
        return self._check(self.lib.diloco_join(self.handle, ctypes.byref(self.info), ctypes.byref(self.error)))

    def step(self, tokens, loss):
        """(*) After each step of the optimiser; exchanges what is due, never waits for the network. False: the job is over."""
        return self._check(self.lib.diloco_step(self.handle, ctypes.c_uint64(tokens), ctypes.c_float(loss), ctypes.byref(self.info),
                                                ctypes.byref(self.error)))

    def close(self):
        self.lib.diloco_close(self.handle)


# --- a small language model of the ordinary kind, on text made of a rule ---

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 32, 8


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.mix = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0])


def batch(generator):
    """Sequences in which each token follows from the one before, but for some noise."""
    tokens = torch.empty(BATCH, LENGTH + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(VOCABULARY, (BATCH,), generator=generator)
    for i in range(LENGTH):
        noise = torch.randint(3, (BATCH,), generator=generator)
        tokens[:, i + 1] = (5 * tokens[:, i] + noise) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)  # Equal first weights everywhere; those of the first learner count.
    model = Model()
    learner = Learner(model)
    goes_on = learner.join()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, betas=(0.8, 0.95))
    generator = torch.Generator().manual_seed(1000 + learner.info.learner)  # Each learner draws data of its own.
    loss = None
    while goes_on:
        inputs, targets = batch(generator)
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        goes_on = learner.step(targets.numel(), loss.item())
        if learner.info.step % 200 == 1:
            print(f"learner {learner.info.learner} step {learner.info.step} loss {loss.item():.3f} "
                  f"tokens of all {learner.info.tokens_all}", flush=True)
    print(f"learner {learner.info.learner} over: {learner.error.text.decode()}; loss {loss.item() if loss is not None else '-'}, "
          f"{learner.info.pushes_total} pushes, {learner.info.updates_total} updates")
    learner.close()


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, KeyError, OSError) as error:
        sys.exit(f"pytorch.py: {error!r}")
