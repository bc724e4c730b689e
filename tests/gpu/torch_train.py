"""PyTorch's tokens per second on the dense models of cases.json: eager, SDPA, bf16 autocast over weights in 32 bits,
fused AdamW, gradients clipped.

    python3 tests/gpu/torch_train.py CASES.json OUT.json
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {
    "gpt2-124m": {"hidden": 768, "layers": 12, "heads": 12, "groups": 12, "inner": 3072, "vocab": 50257, "gated": False},
    "llama-1b": {"hidden": 2048, "layers": 16, "heads": 32, "groups": 8, "inner": 8192, "vocab": 128256, "gated": True},
}


def turned(x, base=500000.0):
    """Rotary positions of [batch, heads, tokens, dim]."""
    half = x.shape[-1] // 2
    turns = base ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * turns
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    def __init__(self, hidden, heads, groups, inner, gated, **_):
        super().__init__()
        self.heads, self.groups, self.gated = heads, groups, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        linear = lambda a, b: nn.Linear(a, b, bias=not gated)
        kv = hidden // heads * groups
        self.norms = nn.ModuleList([norm(hidden), norm(hidden)])
        self.qkv, self.out = linear(hidden, hidden + 2 * kv), linear(hidden, hidden)
        self.up, self.down = linear(hidden, inner * (2 if gated else 1)), linear(inner, hidden)
        self.split = [hidden, kv, kv]

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).split(self.split, -1)
        counts = (self.heads, self.groups, self.groups)
        q, k, v = (p.unflatten(-1, (n, -1)).transpose(1, 2) for p, n in zip(parts, counts))
        if self.gated:
            q, k = turned(q), turned(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.up(self.norms[1](x))
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        return x + self.down(y)


class Decoder(nn.Module):
    def __init__(self, size, tokens):
        super().__init__()
        self.embedding = nn.Embedding(size["vocab"], size["hidden"])
        self.positions = None if size["gated"] else nn.Embedding(tokens, size["hidden"])
        self.layers = nn.ModuleList([Layer(**size) for _ in range(size["layers"])])
        self.norm = (nn.RMSNorm if size["gated"] else nn.LayerNorm)(size["hidden"])

    def forward(self, ids, labels):
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def rate(size, case, micro_batch, device, steps):
    model = Decoder(size, case["seq"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(size["vocab"], (case["global_batch"], case["seq"] + 1), device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        for part in tokens.split(micro_batch):
            with torch.autocast(device, torch.bfloat16):
                loss = model(part[:, :-1], part[:, 1:])
            (loss * len(part) / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        times.append(time.perf_counter() - start)
    times = sorted(times[1:])
    return case["global_batch"] * case["seq"] / times[len(times) // 2]


def main():
    listed, out = sys.argv[1:]
    with open(listed) as file:
        cases = json.load(file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    answer = {}
    for case in cases["models"]:
        if case["name"] not in SIZES:
            continue
        best = {"tokens_per_s": 0.0, "micro_batch": None}
        for micro_batch in sorted({int(s.split(",")[0].removeprefix("mbs=")) for s in case["strategies"]}):
            try:
                found = rate(SIZES[case["name"]], case, micro_batch, device, cases["steps"])
            except torch.OutOfMemoryError:
                break
            if found > best["tokens_per_s"]:
                best = {"tokens_per_s": found, "micro_batch": micro_batch}
        answer[case["name"]] = best | {"torch": torch.__version__, "device": device}
        print(case["name"], answer[case["name"]])
    with open(out, "w") as file:
        json.dump(answer, file, indent=1)


main()
