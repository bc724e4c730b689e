"""Tokens per second of PyTorch on the cpu, on the model of examples/nanogpt-10m: the figure that
docs/executor.md sets beside the executor's.

    python tests/pytorch/speed.py [THREADS]
"""
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, LAYERS, HEADS, SEQ, BATCH, VOCAB = 384, 6, 6, 256, 8, 128
torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.ln_1(x)).split(WIDTH, 2)
        q, k, v = (t.view(BATCH, SEQ, HEADS, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, SEQ, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, labels):
        x = self.layers(self.tokens(ids) + self.places.weight)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ))
times = []
for _ in range(10):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(ids, labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    times.append(time.perf_counter() - start)
median = sorted(times[1:])[len(times) // 2]
print(f"torch {torch.__version__}, {torch.get_num_threads()} threads: {BATCH * SEQ / median:.0f} tokens/s")
