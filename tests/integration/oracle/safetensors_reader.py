"""A reader of the safetensors format of its own, written from the format's description: the tests' second opinion."""
import json
import struct

import torch


def read(path):
    """Tensors by name (float32), and the metadata."""
    with open(path, "rb") as file:
        blob = file.read()
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise ValueError(f"{name}: dtype {entry['dtype']}")
        begin, end = entry["data_offsets"]
        count = (end - begin) // 4
        flat = torch.frombuffer(bytearray(blob[8 + length + begin : 8 + length + end]), dtype=torch.float32, count=count)
        tensors[name] = flat.reshape(entry["shape"]).clone()
    return tensors, metadata
