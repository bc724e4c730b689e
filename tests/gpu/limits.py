"""What a profile of a GPU must show by itself: kernels bound by memory near the bandwidth of a copy, cheap dispatch.

    python3 limits.py PROFILE.yaml OUT.json

A kernel's share is the bytes that it cannot but move, in the time it took, over the bandwidth of the largest copy. Exits
with 1 where a share is under 0.85 or queueing a kernel takes the host over 5 µs. Kernels that move little are listed and
have no floor: starting them takes a good part of their time, and what they write stays in a cache.
"""

import json
import re
import sys

LINE = re.compile(r'kernel: "([^"]+)", sizes: \[([^\]]*)\], ranks: (\d+), seconds: ([\d.e+-]+)')
FLOOR = 0.85
DISPATCH = 5e-6
LARGE = 1 << 28
# Bytes per element that a kernel reads and writes, in bf16 but for the optimizer's states. Weights of a norm and angles
# are read once for many rows.
BYTES = {
    "copy": 8,
    "gradient norm": 4,
    # Weight, moments and gradient; the first three written, and the weight in bf16.
    "adamw": 4 * 4 + 3 * 4 + 2,
    "rms norm forward bf16": 2 * 2,
    "rms norm backward bf16": 3 * 2,
    "layer norm forward bf16": 2 * 2,
    "layer norm backward bf16": 3 * 2,
    "gelu tanh forward bf16": 2 * 2,
    "gelu tanh backward bf16": 3 * 2,
    "silu tanh gated forward bf16": 3 * 2,
    "silu tanh gated backward bf16": 5 * 2,
    "rotary embedding forward bf16": 2 * 2,
    "rotary embedding backward bf16": 2 * 2,
    "add forward bf16": 3 * 2,
    "add backward bf16": 3 * 2,
    # The mask is a byte.
    "dropout forward bf16": 2 * 2 + 1,
    "dropout backward bf16": 2 * 2 + 1,
    # Logits are read twice; their gradient takes their place.
    "cross-entropy forward f32": 3 * 2,
}


def main(profile, out):
    measured = []
    with open(profile) as lines:
        for found in filter(None, map(LINE.search, lines)):
            sizes = [int(size) for size in found[2].split(",")]
            measured.append((found[1], sizes, float(found[4])))
    rows = []
    for kernel, sizes, seconds in measured:
        if kernel in BYTES:
            moved = BYTES[kernel]
            for size in sizes:
                moved *= size
            rows.append({"kernel": kernel, "sizes": sizes, "bytes": moved, "bytes_per_s": moved / seconds})
    copies = [row for row in rows if row["kernel"] == "copy"]
    copy = max(copies, key=lambda row: row["bytes"], default=None)
    dispatch = [seconds for kernel, _, seconds in measured if kernel == "dispatch"]
    failed = [name for name, there in [("copy", copy), ("dispatch", dispatch)] if not there]
    if any(seconds > DISPATCH for seconds in dispatch):
        failed.append(f"queueing a kernel takes {dispatch[0] * 1e6:.1f} µs")
    for row in rows if copy else []:
        row["share"] = row["bytes_per_s"] / copy["bytes_per_s"]
        row["large"] = row["bytes"] >= LARGE
        print(f"{row['share']:.2f}  {row['kernel']} {row['sizes']}{'' if row['large'] else '  (small)'}")
        if row["large"] and row["share"] < FLOOR:
            failed.append(f"{row['kernel']} {row['sizes']}: {row['share']:.2f} of a copy's bandwidth")
    large = {row["kernel"] for row in rows if row.get("large")}
    answer = {"rows": rows, "dispatch_s": dispatch, "large_kernels": sorted(large), "failed": failed}
    with open(out, "w") as file:
        json.dump(answer, file, indent=1)
    print(*failed, sep="\n")
    sys.exit(1 if failed else 0)


main(*sys.argv[1:])
