"""`parallelize`: applies a plan to an unmodified HF-style model."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from . import anatomy, context_parallel, deferred, experts, falling, float8, groups, pipeline, shard, stages
from . import tensor_parallel
from .model import ParallelModel
from .strategy import PlanError, PlanLike, Strategy

OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def parallelize(
    plan: PlanLike,
    model: nn.Module,
    optimizer_fn: OptimizerFn,
    *,
    device: Optional[str] = None,
    global_batches: bool = True,
) -> Tuple[ParallelModel, torch.optim.Optimizer]:
    """Applies `plan` to `model` and makes its optimizer.

    Args:
        plan: a `Plan`, the path of a plan file (YAML or JSON), or its `strategy` mapping.
        model: a causal language model in HF's form (Llama-like or GPT-2-like), unmodified. Its
            weights are those of rank 0; on the meta device they are made after sharding, with the
            model's own initialisation, the same under every plan. It is used up: keep only what this returns.
        optimizer_fn: makes the optimizer from parameters, such as `torch.optim.AdamW`.
        device: `"cuda"` (NCCL) or `"cpu"` (gloo); by default CUDA where there is one.
        global_batches: whether every rank passes the same global batch to the model, which takes
            its share (the default), or each data-parallel rank passes its own share.

    Returns:
        The model, whose call is a step's forward and backward, and the optimizer.

    Raises:
        PlanError: the plan is malformed, does not fit the job's ranks, or says something that
            cannot be applied to this model.
    """
    strategy = Strategy.read(plan)
    parts = anatomy.find(model)
    _check(strategy, parts)
    place = groups.start(strategy, device)
    seed = _same_seed(place)
    later = deferred.Deferred(parts) if next(model.parameters()).is_meta else None
    if later is None:
        model.to(place.device)
        _same_weights(model)
    anatomy.split_fused_qkv(parts)
    tied = parts.tied
    sizes = strategy.stages or _even(len(parts.layers), strategy.pp * strategy.vpp)
    v_shaped = pipeline.v_shaped(strategy)
    mine = [i for i in range(len(sizes)) if stages.place(i, strategy.pp, v_shaped) == place.rank("pp")]
    if strategy.pp == 1:
        # Virtual stages exist for the pipeline only.
        sizes, mine = [len(parts.layers)], [0]
    context = context_parallel.ContextParallel(place) if strategy.cp > 1 else None
    if context is not None:
        context.install(model)
    local = stages.cut(model, sizes, mine)
    fsdp: List[List[FSDPModule]] = []
    for stage in local:
        if strategy.tp > 1:
            tensor_parallel.apply(anatomy.find(stage.model), place.mesh["tp"], strategy.sequence_parallel)
        if strategy.precision == "fp8":
            float8.apply(anatomy.find(stage.model), place.device)
        if strategy.ep > 1:
            experts.apply(stage, place.mesh["ep"])
        shard.recompute(stage, strategy, sizes)
        fsdp.append(shard.data_parallel(stage, place))
    if later is not None:
        later.fill(local, seed, place.device)
    parallel = ParallelModel(local, place, fsdp, tied, context, global_batches)
    return parallel, optimizer_fn(parallel.parameters())


def _check(strategy: Strategy, parts: anatomy.Anatomy) -> None:
    """Refuses what cannot be applied, before anything is changed."""
    name = type(parts.model).__name__
    experts.check(strategy, parts)
    if strategy.precision == "fp16":
        raise PlanError("precision fp16 is not applied; fp8, bf16 and fp32 are")
    float8.check(strategy, parts)
    if strategy.sequence_parallel and strategy.tp == 1:
        raise PlanError("sequence_parallel needs tp > 1")
    if strategy.tp > 1 and parts.head is None:
        raise PlanError(f"tp={strategy.tp}: {name} has no output projection")
    if strategy.tp > 1:
        anatomy.check_heads(parts, strategy.tp, "tp")
    if sum(strategy.stages or (len(parts.layers),)) != len(parts.layers):
        raise PlanError(
            f"stages {list(strategy.stages)} hold {sum(strategy.stages)} layers; {name} has {len(parts.layers)}"
        )
    context_parallel.check(strategy, parts)
    pipeline.check(strategy)
    falling.check(strategy)


def _even(layers: int, count: int) -> List[int]:
    base, extra = divmod(layers, count)
    return [base + (i < extra) for i in range(count)]


def _same_seed(place: groups.Place) -> int:
    """Seeds every rank, data-parallel ranks differently, for dropout; returns rank 0's seed."""
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], device=place.device)
    dist.broadcast(seed, src=0)
    torch.manual_seed(int(seed.item()) + place.dp_rank)
    return int(seed.item())


def _same_weights(model: nn.Module) -> None:
    """Gives every rank rank 0's weights and buffers."""
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
