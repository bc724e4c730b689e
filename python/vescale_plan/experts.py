"""Expert parallelism: each rank holds a part of every layer's experts, and computes the tokens of its group for them.

The experts of a layer are one module with weights of all experts (HF: `gate_up_proj`, `down_proj`). Ranks of a group gather
their tokens, each computes its own experts for the tokens that chose them, and sums are scattered back.
"""

from __future__ import annotations

from typing import Any, List

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils.stateless import _reparametrize_module

from .anatomy import Anatomy
from .strategy import PlanError, Strategy


def find(module: nn.Module) -> List[nn.Module]:
    """The modules in `module` that hold the weights of all experts of a layer, one slice per expert."""
    return [part for part in module.modules() if _holds_experts(part)]


def _holds_experts(module: nn.Module) -> bool:
    weights = list(module.parameters(recurse=False))
    return hasattr(module, "num_experts") and bool(weights) and all(weight.ndim >= 2 for weight in weights) and any(
        weight.ndim == 3 for weight in weights
    )


def check(strategy: Strategy, parts: Anatomy) -> None:
    """Refuses what is not applied."""
    if strategy.ep == 1 and strategy.etp == 1:
        return
    name = type(parts.model).__name__
    layout = f"ep={strategy.ep}, etp={strategy.etp}"
    found = find(parts.model)
    if not found:
        raise PlanError(f"{layout}: {name} has no layer whose experts are one module; plan with ep=1")
    if strategy.etp > 1 or strategy.tp > 1 or strategy.cp > 1 or strategy.dp_replicate > 1:
        raise PlanError(f"{layout}: experts are spread over ranks of dp_shard alone; plan with tp=1, cp=1, dp_replicate=1")
    if strategy.dp_shard % strategy.ep:
        raise PlanError(f"{layout}: ep does not divide dp_shard={strategy.dp_shard}")
    if next(parts.model.parameters()).is_meta:
        raise PlanError(f"{layout}: experts of a model on the meta device are not made; build it on a device")
    count = int(getattr(found[0], "num_experts"))
    if count % strategy.ep:
        raise PlanError(f"{layout}: ep does not divide the {count} experts of {name}")


def apply(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spreads the experts of every layer over `mesh`, in place."""
    for module in find(model):
        for name, weight in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(placed, requires_grad=weight.requires_grad))
        _spread(module, mesh)


def _spread(module: Any, mesh: DeviceMesh) -> None:
    """Replaces a module's forward: this rank's experts compute the tokens of the whole group."""
    count = module.num_experts // mesh.size()
    first = count * mesh.get_local_rank()
    group = mesh.get_group()
    compute = module.forward
    module.num_experts = count

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = _Gather.apply(hidden_states, group)
        weights: torch.Tensor = _Gather.apply(top_k_weights, group)
        index = _gathered(top_k_index, group)
        row, choice = torch.where((index >= first) & (index < first + count))
        weight = weights[row, choice]
        if not len(row):
            # An expert without tokens has gradients too, of zero: ranks with the same experts reduce them together.
            row, choice = index.new_zeros(1), index.new_zeros(1)
            weight = weights[row, choice] * 0
        expert = (index[row, choice] - first).clamp(0, count - 1)
        local = {name: _local(table) for name, table in module.named_parameters(recurse=False)}
        with _reparametrize_module(module, local):
            computed = compute(tokens[row], expert[:, None], weight[:, None])
        out = torch.zeros_like(tokens).index_add(0, row, computed.to(tokens.dtype))
        scattered: torch.Tensor = _Scatter.apply(out, group)
        return scattered

    module.forward = forward


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks."""
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's rows of the sum over ranks."""
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    """Gathers rows; gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return _scattered(grad_outputs[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    """Sums over ranks and scatters rows; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return _gathered(grad_outputs[0], ctx.group), None
