"""PyTorch's times for what a profile of ours measured: products, attention, copies.

    python3 torch_times.py PROFILE.yaml OUT.json

For every shape the ratio is PyTorch's time over ours: above 1 ours is faster. Exits with 1 where a product is
under 0.95, attention forward and backward together under 0.7, or copies under 0.85 of PyTorch's bandwidth. Products in
8 bits, with their casts, are listed and have no floor.
"""

import json
import re
import sys
import time

import torch

LINE = re.compile(r'kernel: "([^"]+)", sizes: \[([^\]]*)\], ranks: (\d+), seconds: ([\d.e+-]+)')
FLOORS = {"matmul": 0.95, "attention": 0.7, "copy": 0.85}


def lap(work, calls):
    """Seconds of one call, of so many in a row between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def median_seconds(work, seconds=0.03):
    """Median over laps of a millisecond or more, after a warm-up as long as a third of them, so that clocks are those of
    work that goes on, as ours are."""
    for _ in range(3):
        work()
    calls = min(128, max(1, int(1e-3 / lap(work, 3))))
    for share in (1 / 3, 1.0):
        times, begin = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < share * seconds:
            times.append(lap(work, calls))
    return sorted(times)[len(times) // 2]


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def product(m, n, k, dtype=torch.bfloat16):
    a, b = random(m, k, dtype=dtype), random(n, k, dtype=dtype)
    return median_seconds(lambda: a @ b.T)


def tf32_product(m, n, k):
    torch.backends.cuda.matmul.allow_tf32 = True
    time = product(m, n, k, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    return time


def cast(x):
    """To E4M3 by the current maximum, and what takes it back."""
    scale = 448.0 / x.abs().amax().float().clamp(min=1e-12)
    return (x * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale.reciprocal()


def eight_bit_product(m, n, k):
    # Casts count, as ours do.
    a, b = random(m, k), random(n, k)

    def work():
        (a8, by_a), (b8, by_b) = cast(a), cast(b)
        torch._scaled_mm(a8, b8.T, scale_a=by_a, scale_b=by_b, out_dtype=torch.bfloat16)

    return median_seconds(work)


def weight_gradient(m, n, k):
    # m and n are the weight's; k rows are contracted, added up in 32 bits.
    dy, x = random(k, m), random(k, n)
    total = torch.zeros(m, n, device="cuda")
    try:
        return median_seconds(lambda: torch.addmm(total, dy.T, x, out_dtype=torch.float32))
    except (TypeError, RuntimeError):
        return median_seconds(lambda: dy.T @ x)


def attention(lines, queries, keys, dim):
    q, k, v = (random(1, lines, length, dim).requires_grad_() for length in (queries, keys, keys))
    d = random(1, lines, queries, dim)

    def both():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), d)

    return median_seconds(both)


def main(profile, out):
    ours = {}
    for line in open(profile):
        found = LINE.search(line)
        if found:
            sizes = tuple(int(size) for size in found[2].split(","))
            ours[found[1], sizes] = float(found[4])
    rows = []

    def row(kind, kernel, sizes, mine, theirs):
        rows.append({"kind": kind, "kernel": kernel, "sizes": sizes, "ours_s": mine, "torch_s": theirs,
                     "ratio": theirs / mine})

    for (kernel, sizes), seconds in sorted(ours.items()):
        if kernel.startswith("matmul") and kernel.endswith("bf16") and min(sizes) >= 256:
            theirs = weight_gradient if "weight gradient" in kernel else product
            row("matmul", kernel, sizes, seconds, theirs(*sizes))
        if kernel == "matmul forward tf32" and min(sizes) >= 256:
            row("matmul", kernel, sizes, seconds, tf32_product(*sizes))
        if kernel == "matmul forward f8" and min(sizes) >= 256:
            row("matmul in 8 bits", kernel, sizes, seconds, eight_bit_product(*sizes))
        if kernel == "attention scores forward bf16":
            # Fused attention counts with the first of its pieces, forward and backward.
            lines, queries, keys, dim = sizes
            back = ours.get(("attention context of input 0 backward bf16", sizes))
            if back is not None:
                row("attention", "attention", sizes, seconds + back, attention(*sizes))
        if kernel == "copy" and sizes[0] >= 1 << 28:
            x = torch.empty(sizes[0], device="cuda")
            y = torch.empty_like(x)
            row("copy", kernel, sizes, seconds, median_seconds(lambda: y.copy_(x)))
    kinds = {row["kind"] for row in rows}
    missing = sorted(set(FLOORS) - kinds)
    below = [row for row in rows if row["ratio"] < FLOORS.get(row["kind"], 0.0)]
    answer = {"torch": torch.__version__, "rows": rows, "missing": missing, "below": below}
    json.dump(answer, open(out, "w"), indent=1)
    for entry in rows:
        print(f"{entry['ratio']:.2f}  {entry['kernel']} {entry['sizes']}")
    sys.exit(1 if below or missing else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
