"""The Llama architecture in plain torch operations, in double, on a dictionary of weights."""
import torch


def norm(x, gain, epsilon):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * gain


def rotate(x, cosine, sine):
    a, b = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-b, a), dim=-1) * sine


def attention(x, weights, prefix, heads, kv_heads, cosine, sine):
    batch, length, width = x.shape
    head_width = width // heads
    q, k, v = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    q = q.view(batch, length, heads, head_width).transpose(1, 2)
    k = k.view(batch, length, kv_heads, head_width).transpose(1, 2)
    v = v.view(batch, length, kv_heads, head_width).transpose(1, 2)
    q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
    k = k.repeat_interleave(heads // kv_heads, dim=1)
    v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = q @ k.transpose(-1, -2) / head_width**0.5
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
    return y.transpose(1, 2).reshape(batch, length, width) @ weights[f"{prefix}.o_proj.weight"].T


def loss(weights, settings, tokens, targets):
    heads, kv_heads = int(settings["heads"]), int(settings["kv_heads"])
    epsilon = settings["norm_epsilon"]
    embed = weights["model.embed_tokens.weight"]
    head_width = embed.shape[1] // heads
    steps = torch.arange(0, head_width, 2, dtype=torch.float64)
    angle = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64), settings["rope_theta"] ** (-steps / head_width))
    angle = torch.cat((angle, angle), dim=-1)
    x = embed[tokens]
    for i in range(int(settings["layers"])):
        layer = f"model.layers.{i}"
        normed = norm(x, weights[f"{layer}.input_layernorm.weight"], epsilon)
        x = x + attention(normed, weights, f"{layer}.self_attn", heads, kv_heads, angle.cos(), angle.sin())
        normed = norm(x, weights[f"{layer}.post_attention_layernorm.weight"], epsilon)
        gate = normed @ weights[f"{layer}.mlp.gate_proj.weight"].T
        up = normed @ weights[f"{layer}.mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    head = embed if settings["tied"] else weights["lm_head.weight"]
    logits = norm(x, weights["model.norm.weight"], epsilon) @ head.T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
