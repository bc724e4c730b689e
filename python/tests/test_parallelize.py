"""Training under a plan equals training in one process. Run it by torchrun over four processes:

    torchrun --nproc-per-node 4 test_parallelize.py

Every case trains a tiny, unmodified HF model with random weights for five steps, in f32, on the
same batches; each loss must equal single-process PyTorch's within 1e-5. AdamW with clipping is blind to
the gradient's scale, so every case runs with SGD as well.
"""

import copy
import importlib.util
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from vescale_plan import PlanError, parallelize, pipeline

STEPS, BATCH, TOKENS, VOCABULARY = 5, 8, 16, 96
TOLERANCE = 1e-5
# Of losses with products in bf16 or in 8 bits, whose numbers have 8 and 4 significant bits.
ROUNDING = 0.03


def llama(tied=False, kv_heads=2):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def gpt2():
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def mixtral():
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return MixtralForCausalLM(config)


MODELS = {"llama": llama, "llama-tied": lambda: llama(tied=True), "gpt2": gpt2}
# Four ranks of tensor parallelism need four key-value heads.
WIDE = {"llama": lambda: llama(kv_heads=4), "gpt2": gpt2}

FOUR_BY_TWO = {"micro_batch": 2, "num_micro_batches": 4}
TWO_RANKS = {"micro_batch": 2, "num_micro_batches": 2}
PLANS = {
    "tp2 x fsdp2": {"tp": 2, "dp_shard": 2, "zero": 3, "reshard_after_forward": True, **TWO_RANKS},
    "tp2 sequence parallel x fsdp2": {"tp": 2, "sequence_parallel": True, "dp_shard": 2, "zero": 2, **TWO_RANKS},
    "tp2 x ddp2": {"tp": 2, "dp_replicate": 2, **TWO_RANKS},
    "fsdp4 zero-3": {"dp_shard": 4, "zero": 3, "reshard_after_forward": True, "micro_batch": 2},
    "fsdp4 two layers ahead": {"dp_shard": 4, "zero": 3, "reshard_after_forward": True, "prefetch": 2, "micro_batch": 2},
    "fsdp4 zero-1, accumulating": {"dp_shard": 4, "zero": 1, "micro_batch": 1, "num_micro_batches": 2},
    "fsdp4 recomputed": {"dp_shard": 4, "zero": 3, "recompute": "full", "micro_batch": 2},
    "fsdp4 one layer recomputed": {"dp_shard": 4, "zero": 3, "recompute": "layers:1", "micro_batch": 2},
    "pp2 x fsdp2, fewer recomputed later": {
        "pp": 2,
        "schedule": "1f1b",
        "dp_shard": 2,
        "zero": 1,
        "recompute": "falling:1",
        "micro_batch": 1,
        "num_micro_batches": 4,
    },
    "fsdp4 selective ops": {"dp_shard": 4, "zero": 3, "recompute": "selective_ops", "micro_batch": 2},
    "hsdp 2x2": {"dp_shard": 2, "dp_replicate": 2, "zero": 3, "reshard_after_forward": True, "micro_batch": 2},
    "pp4 1f1b": {"pp": 4, "schedule": "1f1b", **FOUR_BY_TWO},
    "pp4 gpipe, uneven": {"pp": 4, "schedule": "gpipe", "stages": [2, 1, 1, 0], **FOUR_BY_TWO},
    "pp2 interleaved x fsdp2": {
        "pp": 2,
        "vpp": 2,
        "schedule": "interleaved",
        "dp_shard": 2,
        "zero": 2,
        **TWO_RANKS,
    },
    "pp4 zb-h1": {"pp": 4, "schedule": "zb-h1", **FOUR_BY_TWO},
    "pp2 zb-v x ddp2": {"pp": 2, "vpp": 2, "schedule": "zb-v", "dp_replicate": 2, "micro_batch": 1, "num_micro_batches": 4},
    "pp2 dualpipe-v x fsdp2": {
        "pp": 2,
        "vpp": 2,
        "schedule": "dualpipe-v",
        "dp_shard": 2,
        "zero": 1,
        "micro_batch": 1,
        "num_micro_batches": 4,
    },
    "cp2 x fsdp2": {"cp": 2, "cp_kind": "all_gather", "dp_shard": 2, "zero": 3, **TWO_RANKS},
    "cp2 x tp2": {"cp": 2, "cp_kind": "all_gather", "tp": 2, "sequence_parallel": True, **FOUR_BY_TWO},
    "cp2 all-to-all x fsdp2": {"cp": 2, "cp_kind": "all_to_all", "dp_shard": 2, "zero": 3, **TWO_RANKS},
    "cp2 x pp2": {"cp": 2, "cp_kind": "all_gather", "pp": 2, "schedule": "1f1b", **FOUR_BY_TWO},
    "pp2 x tp2": {"pp": 2, "tp": 2, "schedule": "1f1b", **FOUR_BY_TWO},
    "pp2 x tp2 sequence parallel": {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "1f1b", **FOUR_BY_TWO},
}

EXPERTS = {
    "ep2 x fsdp4": {"ep": 2, "dp_shard": 4, "zero": 3, "reshard_after_forward": True, "micro_batch": 2},
    "ep2 x fsdp4, two layers ahead": {
        "ep": 2,
        "dp_shard": 4,
        "zero": 3,
        "reshard_after_forward": True,
        "prefetch": 2,
        "micro_batch": 2,
    },
    "ep4, zero-1, accumulating": {"ep": 4, "dp_shard": 4, "zero": 1, "micro_batch": 1, "num_micro_batches": 2},
    "ep2 x fsdp2 x pp2, recomputed": {"ep": 2, "dp_shard": 2, "zero": 2, "pp": 2, "recompute": "full", **TWO_RANKS},
    "fsdp4": {"dp_shard": 4, "zero": 3, "micro_batch": 2},
}

# Roundings to bf16 and to 8 bits stay; PyTorch in one process does neither.
ROUNDED = {
    "fsdp4 bf16": {"dp_shard": 4, "zero": 3, "precision": "bf16", "micro_batch": 2},
    "fsdp2 x pp2 fp8": {"dp_shard": 2, "zero": 3, "pp": 2, "precision": "fp8", **TWO_RANKS},
    "fsdp4 fp8": {"dp_shard": 4, "zero": 3, "precision": "fp8", "micro_batch": 2},
}

TP_OF_ALL = {
    "tp4": {"tp": 4, **FOUR_BY_TWO},
    "tp4 sequence parallel": {"tp": 4, "sequence_parallel": True, **FOUR_BY_TWO},
}


def batches():
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        # Sequences that count, so that there is something to learn.
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        ids = (start + torch.arange(TOKENS)) % VOCABULARY
        labels = ids.clone()
        # Masked tokens differ by sequence, so that means over micro-batches would be wrong.
        for row in range(BATCH):
            labels[row, : row + 1] = -100
        yield {"input_ids": ids, "labels": labels}


# Optimizer, and the norm that gradients are clipped to.
OPTIMIZERS = {
    "adamw": (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), 1.0),
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=0.3), None),
}


def single(model, optimizer_fn, clip):
    """Losses of the user's loop in one process."""
    optimizer = optimizer_fn(model.parameters())
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def planned(plan, model, optimizer_fn, clip):
    """Losses of the same loop under a plan."""
    model, optimizer = parallelize(plan, model, optimizer_fn, device="cpu")
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


REFUSED = [
    ({"dp_shard": 2, "zero": 3}, "the plan is for 2 ranks"),
    ({"tp": 4}, "tp=4 does not divide the model's 2 key-value heads; nearest that does: 2"),
    ({"tp": 2, "ep": 2, "dp_shard": 2, "zero": 3}, "LlamaForCausalLM has no layer whose experts are one module"),
    ({"pp": 4, "stages": [1, 1, 1, 2]}, "stages [1, 1, 1, 2] hold 5 layers"),
    ({"pp": 2, "dp_shard": 2, "zero": 3, "vpp": 2, "schedule": "1f1b"}, "1f1b has one stage per rank"),
    ({"cp": 4, "cp_kind": "ring"}, "cp_kind ring is not applied; all_gather and all_to_all are"),
    ({"cp": 4, "cp_kind": "all_to_all"}, "cp * tp=4 does not divide the model's 2 key-value heads"),
    ({"dp_shard": 4, "zero": 3, "precision": "fp16"}, "precision fp16 is not applied"),
    ({"tp": 2, "dp_shard": 2, "zero": 3, "precision": "fp8"}, "precision fp8 is applied without tensor and expert parallelism"),
    ({"dp_shard": 4, "zero": 3, "precision": "fp8", "fp8_recipe": "rowwise"}, "strategy.fp8_recipe is 'rowwise'; expected tensorwise"),
    ({"dp_shard": 4, "zero": 0}, "dp_shard > 1 with zero: 0"),
    ({"dp_shard": 4, "zero": 3, "prefetch": 0}, "strategy.prefetch is 0; expected 1 to 8 blocks"),
    ({"dp_shard": 4, "zero": 1, "prefetch": 2}, "strategy.prefetch is 2; expected none"),
    ({"dp_shard": 4, "zero": 3, "recompute": "falling:2"}, "needs pp of at least 2"),
    ({"dp_shard": 4, "zero": 3, "micro_batch": 3}, "the batch has 8 sequences; the plan's global batch is 12"),
]


def refusals():
    """Plans that cannot be applied are refused in one line."""
    for plan, said in REFUSED:
        try:
            planned(plan, llama(), *OPTIMIZERS["adamw"])
        except PlanError as error:
            assert said in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"{plan} was applied")
    if dist.get_rank() == 0:
        print(f"{len(REFUSED)} refusals ok", flush=True)


def runs_here(plan):
    """Whether this torch has the plan's schedule, and torchao is there for fp8; what lacks is refused."""
    if plan.get("precision") == "fp8" and importlib.util.find_spec("torchao") is None:
        return False
    if pipeline.available(plan.get("schedule", "1f1b")):
        return True
    try:
        planned(plan, llama(), *OPTIMIZERS["adamw"])
    except PlanError as error:
        assert "a newer torch does" in str(error), error
        return False
    raise AssertionError(f"{plan} was applied")


def check(build, plans, settings):
    """Cases whose losses are not those of one process."""
    if not plans:
        return []
    torch.manual_seed(1)
    original = build()
    expected = single(copy.deepcopy(original), *settings)
    assert expected[0] > expected[-1], "the reference does not learn"
    failed = []
    for case, plan in plans.items():
        if not runs_here(plan):
            continue
        got = planned(plan, copy.deepcopy(original), *settings)
        worst = max(abs(a - b) / abs(b) for a, b in zip(got, expected))
        tolerance = TOLERANCE if plan.get("precision", "fp32") == "fp32" else ROUNDING
        verdict = "ok" if worst <= tolerance else "WRONG"
        if verdict != "ok":
            failed.append(case)
        if dist.get_rank() == 0:
            print(f"{case:50} {worst:.1e} {verdict}", flush=True)
    return failed


def main():
    torch.set_num_threads(1)
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    dist.init_process_group("gloo")
    failed = []
    refusals()
    for models, plans in ((MODELS, PLANS), (WIDE, TP_OF_ALL), ({"mixtral": mixtral}, EXPERTS), ({"llama": llama}, ROUNDED)):
        for name, build in models.items():
            for optimizer, settings in OPTIMIZERS.items():
                chosen = {f"{name} {optimizer}: {title}": plan for title, plan in plans.items()}
                failed += check(build, {case: plan for case, plan in chosen.items() if only in case}, settings)
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
