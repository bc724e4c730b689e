"""A model built on the meta device gets the same weights under every plan.

    torchrun --nproc-per-node 4 test_deferred.py
"""

import sys

import torch
import torch.distributed as dist
from test_parallelize import MODELS, OPTIMIZERS, PLANS, TOLERANCE, planned, runs_here

from vescale_plan import parallelize

CASES = (
    "fsdp4 zero-3",
    "tp2 x fsdp2",
    "tp2 sequence parallel x fsdp2",
    "hsdp 2x2",
    "pp4 1f1b",
    "pp2 zb-v x ddp2",
    "pp2 x tp2",
)


def check_spread(model, reference):
    """Weights are spread as the model's own initialisation spreads them, and buffers are the same."""
    whole = {name: p.detach().full_tensor() for name, p in model.original_parameters()}
    for name, wanted in reference.named_parameters():
        if name not in whole:
            # GPT-2's fused projection was split.
            owner, kind = name.rsplit(".", 1)
            made = torch.cat([whole[f"{owner}.{part}.{kind}"] for part in "qkv"], dim=-1)
        else:
            made = whole[name]
        assert made.shape == wanted.shape, name
        assert torch.isclose(made.std(), wanted.std(), rtol=0.2, atol=1e-6), (name, made.std(), wanted.std())
        assert torch.isclose(made.mean(), wanted.mean(), atol=5e-3), (name, made.mean(), wanted.mean())
    for name, wanted in reference.named_buffers():
        torch.testing.assert_close(dict(model.stages[0].model.named_buffers())[name], wanted)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = False
    for name, build in MODELS.items():
        expected = None
        for case in CASES:
            if not runs_here(PLANS[case]):
                continue
            torch.manual_seed(5)
            with torch.device("meta"):
                model = build()
            if case == CASES[0]:
                check_spread(parallelize(PLANS[case], model, OPTIMIZERS["adamw"][0], device="cpu")[0], build())
                torch.manual_seed(5)
                with torch.device("meta"):
                    model = build()
            losses = planned(PLANS[case], model, *OPTIMIZERS["adamw"])
            expected = expected or losses
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
            sound = worst <= TOLERANCE and losses[-1] < losses[0]
            failed |= not sound
            if dist.get_rank() == 0:
                print(f"{name}: deferred, {case:32} {worst:.1e} {'ok' if sound else 'WRONG'}", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
