"""A checkpoint saved under one plan continues under another as if nothing had happened. One saved before the first step
changes nothing either.

    torchrun --nproc-per-node 4 test_checkpoint.py
"""

import copy
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from test_parallelize import MODELS, OPTIMIZERS, TOLERANCE, batches, single, runs_here

from vescale_plan import load, parallelize, save

ROUTES = [
    ({"tp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 4}, {"dp_shard": 4, "zero": 3, "micro_batch": 2}),
    ({"dp_shard": 4, "zero": 2, "micro_batch": 2}, {"pp": 2, "tp": 2, "micro_batch": 2, "num_micro_batches": 4}),
    (
        {"pp": 4, "schedule": "1f1b", "micro_batch": 2, "num_micro_batches": 4},
        {"pp": 2, "vpp": 2, "schedule": "zb-v", "dp_shard": 2, "zero": 2, "micro_batch": 2, "num_micro_batches": 2},
    ),
    ({"pp": 2, "tp": 2, "micro_batch": 2, "num_micro_batches": 4}, {"tp": 4, "micro_batch": 8}),
]
BREAK = 2


def run(model, optimizer, steps):
    losses = []
    for batch in steps:
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    failed = False
    for name, build in MODELS.items():
        torch.manual_seed(1)
        original = build()
        optimizer_fn, clip = OPTIMIZERS["adamw"]
        expected = single(copy.deepcopy(original), optimizer_fn, clip)
        steps = list(batches())
        for number, (first, second) in enumerate(ROUTES):
            if max(first.get("tp", 1), second.get("tp", 1)) > getattr(original.config, "num_key_value_heads", 4):
                continue
            if not (runs_here(first) and runs_here(second)):
                continue
            path = os.path.join(folder[0], f"{name}-{number}")
            model, optimizer = parallelize(first, copy.deepcopy(original), optimizer_fn, device="cpu")
            save(path, {"model": model, "optimizer": optimizer})
            losses = run(model, optimizer, steps[:BREAK])
            save(path, {"model": model, "optimizer": optimizer})
            torch.manual_seed(99)
            model, optimizer = parallelize(second, build(), optimizer_fn, device="cpu")
            load(path, {"model": model, "optimizer": optimizer})
            losses += run(model, optimizer, steps[BREAK:])
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
            failed |= worst > TOLERANCE
            if dist.get_rank() == 0:
                print(f"{name}: checkpoint {number} {worst:.1e} {'ok' if worst <= TOLERANCE else 'WRONG'}", flush=True)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
