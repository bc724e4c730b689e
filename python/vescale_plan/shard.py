"""Data parallelism (FSDP2) and recomputation of one stage."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from . import anatomy, experts, falling
from .groups import Place
from .stages import Stage
from .strategy import PlanError, Strategy


def recompute(stage: Stage, strategy: Strategy, sizes: Sequence[int]) -> None:
    """Wraps the parts of a stage that the plan recomputes; `sizes` has the layers of every stage."""
    how = strategy.recompute
    if how.startswith("falling:"):
        how = f"layers:{falling.recomputed(strategy, sizes, stage.index)}"
    if how == "none":
        return
    parts = anatomy.find(stage.model)
    present = [i for i, layer in enumerate(parts.layers) if next(layer.parameters(), None) is not None]
    if how == "full" or how.startswith("layers:"):
        count = len(present) if how == "full" else int(how.split(":", 1)[1])
        for i in present[:count]:
            parts.layers[i] = _wrap(parts.layers[i])
    elif how == "selective":
        # The core of attention. Kernels that do not store the scores leave nothing to recompute.
        implementation = getattr(getattr(stage.model, "config", None), "_attn_implementation", "eager")
        if implementation == "eager":
            for i in present:
                for name, child in list(parts.layers[i].named_children()):
                    if name in anatomy.ATTENTIONS:
                        setattr(parts.layers[i], name, _wrap(child))
    elif how == "selective_ops":
        for i in present:
            parts.layers[i] = _wrap(parts.layers[i], context_fn=_alternate_matmuls)
    else:
        raise PlanError(f"strategy.recompute is {how!r}; expected none, selective, full, layers:N, falling:N or selective_ops")


def _wrap(module: nn.Module, **options: Any) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)


def _alternate_matmuls() -> Any:
    """Keeps attention, collectives and every other matrix product; recomputes the rest."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default}
    if hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu"):
        kept.add(aten._scaled_dot_product_flash_attention_for_cpu.default)
    kept.add(torch.ops._c10d_functional.reduce_scatter_tensor.default)
    products = {aten.mm.default, aten.addmm.default}
    seen = {"forward": 0, "backward": 0}

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator in products:
            phase = "backward" if context.is_recompute else "forward"
            seen[phase] += 1
            keep = seen[phase] % 2 == 1
        else:
            keep = operator in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    make: Callable[..., Any] = create_selective_checkpoint_contexts
    return make(policy)


# Precisions with parameters and activations in bf16; fp8 also has products of layers in 8 bits.
HALF = ("bf16", "fp8")


def needs_fsdp(strategy: Strategy) -> bool:
    """Whether parameters go through FSDP2: it also casts for mixed precision."""
    return strategy.dp > 1 or strategy.cp > 1 or strategy.precision in HALF


def data_parallel(stage: Stage, place: Place) -> List[FSDPModule]:
    """Applies `fully_shard` to the stage's layers and to the stage.

    Ranks of the same sequence (context parallel) share parameters like data-parallel ranks do.
    """
    strategy = place.strategy
    if not needs_fsdp(strategy):
        return []
    if strategy.dp_shard > 1 and strategy.zero == 0:
        raise PlanError("dp_shard > 1 with zero: 0; a plan that shards nothing has its ranks in dp_replicate")
    mesh = _mesh(place)
    precision = MixedPrecisionPolicy()
    if strategy.precision in HALF:
        reduced = torch.bfloat16 if strategy.grad_dtype == "fp32/bf16" else torch.float32
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    reshard = strategy.zero == 3 and strategy.reshard_after_forward
    parts = anatomy.find(stage.model)
    # Each layer with its experts, which are wrapped by themselves.
    layers: List[List[FSDPModule]] = []
    for layer in parts.layers:
        if next(layer.parameters(), None) is not None:
            inner = []
            if strategy.ep > 1:
                # Only ranks with the same experts share their weights.
                for part in experts.find(layer):
                    inner.append(fully_shard(part, mesh=mesh_of_experts(place), mp_policy=precision, reshard_after_forward=reshard))
            layers.append([fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard), *inner])
    if strategy.prefetch is not None:
        gather_ahead(layers, strategy.prefetch)
    wrapped = [module for layer in layers for module in layer]
    wrapped.append(fully_shard(stage, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard))
    for module in wrapped:
        # Every rank's loss is already its share of the global mean: gradients are summed.
        # Plain sums, because gloo has no scaled ones.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return wrapped


def mesh_of_experts(place: Place) -> DeviceMesh:
    """The ranks that hold the same experts."""
    return place.mesh["edp"]


def gather_ahead(layers: List[List[FSDPModule]], blocks: int) -> None:
    """Makes every layer gather the parameters of the next `blocks` layers, in forward and in backward.

    A layer comes with the modules in it that are wrapped by themselves: these are gathered with it.
    """
    for at, (layer, *_) in enumerate(layers):
        later = layers[at + 1 : at + 1 + blocks]
        earlier = layers[max(0, at - blocks) : at][::-1]
        layer.set_modules_to_forward_prefetch([module for of in later for module in of])
        layer.set_modules_to_backward_prefetch([module for of in earlier for module in of])


def _mesh(place: Place) -> DeviceMesh:
    strategy, mesh = place.strategy, place.mesh
    axes = mesh.mesh_dim_names or ()
    if strategy.cp > 1:
        names = tuple(n for n in axes if n in ("dp_shard", "cp"))
        sharded = mesh[names]._flatten("dp_shard_cp")
    else:
        sharded = mesh["dp_shard"]
    if strategy.dp_replicate == 1:
        return sharded
    names = tuple(n for n in axes if n in ("dp_replicate", "dp_shard"))
    if names != ("dp_replicate", "dp_shard"):
        raise PlanError("axis_order puts dp_replicate inside dp_shard; HSDP needs it outside")
    return mesh[names]
