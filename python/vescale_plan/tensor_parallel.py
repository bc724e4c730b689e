"""Tensor parallelism: a DTensor style for every module that holds parameters."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from . import anatomy
from .anatomy import Anatomy
from .strategy import PlanError

SEQUENCE = Shard(1)


class Conv1DParallel(ParallelStyle):
    """Shards HF's `Conv1D` (weight stored (in, out)) by columns or rows."""

    def __init__(self, rowwise: bool, output: Placement):
        super().__init__()
        self.rowwise = rowwise
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        given = Shard(-1) if self.rowwise else Replicate()
        layouts: Dict[str, Placement] = {"weight": Shard(1), "bias": Shard(0)}
        if self.rowwise:
            layouts = {"weight": Shard(0), "bias": Replicate()}
        return distribute_module(
            module, device_mesh, partial(_place, layouts), partial(_enter, given), partial(_leave, self.output)
        )


class Replicated(ParallelStyle):
    """Keeps a module's parameters whole, as DTensors, so that one optimizer serves all."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts = {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
        return distribute_module(
            module, device_mesh, partial(_place, layouts), partial(_enter, Replicate()), partial(_leave, Replicate())
        )


class ReplicatedEmbedding(ParallelStyle):
    """Keeps a table of positions whole, and looks up on this rank alone.

    DTensor of torch 2.8 confuses the gradients of two tables of the same width.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, partial(_place, {"weight": Replicate()}))

        def look_up(ids: torch.Tensor) -> torch.Tensor:
            table: Any = module.weight
            return nn.functional.embedding(ids, table.to_local(grad_placements=[Replicate()]))

        setattr(module, "forward", look_up)
        return module


def _place(layouts: Mapping[str, Placement], _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, layout in layouts.items():
        value = getattr(module, name, None)
        if value is None:
            continue
        placed = distribute_tensor(value.detach(), mesh, [layout])
        module.register_parameter(name, nn.Parameter(placed, requires_grad=value.requires_grad))


def _enter(given: Placement, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    first, *rest = inputs
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, mesh, [given], run_check=False)
    return (first, *rest)


def _leave(wanted: Placement, _module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
    if wanted == Shard(-1):
        wanted = Shard(output.ndim - 1)
    if tuple(output.placements) != (wanted,):
        output = output.redistribute(placements=[wanted])
    return output.to_local()


def apply(parts: Anatomy, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shards `parts.model` over `mesh` in place."""
    degree = mesh.size()
    anatomy.check_heads(parts, degree, "tp")
    tied = parts.tied
    styles = _styles(parts, sequence_parallel)
    # Fused projections first: what HF computes from the full width is now this rank's width.
    for attention in (module for _, module in parts.attention_modules()):
        if isinstance(getattr(attention, "c_attn", None), anatomy.SplitQkv):
            setattr(attention, "split_size", getattr(attention, "split_size") // degree)
    parallelize_module(parts.model, mesh, styles)
    if tied:
        parts.tie()
    if sequence_parallel:
        _enter_and_leave_sequence(parts, mesh)
    left = [name for name, p in parts.model.named_parameters() if not isinstance(p, DTensor)]
    if left:
        raise PlanError(f"tp={degree}: no rule for parameter {left[0]} of {type(parts.model).__name__}")


def _styles(parts: Anatomy, sequence_parallel: bool) -> Dict[str, ParallelStyle]:
    inner = SEQUENCE if sequence_parallel else Replicate()
    styles: Dict[str, ParallelStyle] = {}
    layers = f"{parts.base_name}.{parts.layers_name}."
    for name, module in parts.model.named_modules():
        own = next(module.parameters(recurse=False), None) is not None
        leaf = name.rsplit(".", 1)[-1]
        if name.startswith(layers):
            inside = name[len(layers) :].split(".")[1:]
            style = _layer_style(name, module, leaf, inside, own, inner)
        elif not own:
            continue
        elif module is parts.embedding:
            style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif module is parts.head:
            style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif isinstance(module, nn.Embedding):
            style = ReplicatedEmbedding()
        else:
            style = Replicated()
        if style is not None:
            styles[name] = style
    return styles


def _layer_style(
    name: str, module: nn.Module, leaf: str, inside: List[str], own: bool, inner: Placement
) -> Optional[ParallelStyle]:
    sequence_parallel = inner != Replicate()
    if len(inside) == 1 and leaf in anatomy.ATTENTIONS | anatomy.MLPS:
        return _Gathered() if sequence_parallel else None
    if not own:
        return None
    within = set(inside[:-1]) & (anatomy.ATTENTIONS | anatomy.MLPS)
    if within and leaf in anatomy.COLUMN:
        if anatomy.is_conv1d(module):
            return Conv1DParallel(rowwise=False, output=Shard(-1))
        return ColwiseParallel()
    if within and leaf in anatomy.ROW:
        if anatomy.is_conv1d(module):
            return Conv1DParallel(rowwise=True, output=inner)
        return RowwiseParallel(output_layouts=inner)
    if anatomy.is_norm(module):
        if within:
            # A norm over one head's features sees the rank's own heads: its gradients differ by rank.
            return _HeadNorm()
        return SequenceParallel(use_local_output=True) if sequence_parallel else Replicated()
    raise PlanError(f"tp: no rule for {name} ({type(module).__name__}); known are Llama-like and GPT-2-like layers")


class _HeadNorm(ParallelStyle):
    """A norm inside attention, over (batch, sequence, heads, features) with the rank's own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts = {name: Replicate() for name, _ in module.named_parameters(recurse=False)}
        return distribute_module(
            module, device_mesh, partial(_place, layouts), partial(_enter, Shard(2)), partial(_leave, Shard(2))
        )


class _Gathered(ParallelStyle):
    """Gathers the sequence before attention or MLP; `hidden_states` may be positional or a keyword."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(x: torch.Tensor) -> DTensor:
            # It stays a DTensor, so that the gradients of all projections are reduce-scattered once.
            return DTensor.from_local(x, device_mesh, [SEQUENCE], run_check=False).redistribute(placements=[Replicate()])

        def gather(_module: nn.Module, args: Any, kwargs: Dict[str, Any]) -> Tuple[Any, Dict[str, Any]]:
            if args:
                return (whole(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": whole(kwargs["hidden_states"])}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def _enter_and_leave_sequence(parts: Anatomy, mesh: DeviceMesh) -> None:
    """Splits the sequence at the first layer, gathers it after the last."""
    layers = [layer for layer in parts.layers if next(layer.parameters(), None) is not None]
    if not layers:
        return

    def split(_module: nn.Module, args: Any) -> Tuple[Any, ...]:
        hidden = args[0]
        if hidden.shape[1] % mesh.size():
            raise PlanError(
                f"sequence parallelism over tp={mesh.size()} needs a multiple of it in tokens; got {hidden.shape[1]}"
            )
        placed = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        return (placed.redistribute(placements=[SEQUENCE]).to_local(), *args[1:])

    def gather(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        placed = DTensor.from_local(output, mesh, [SEQUENCE], run_check=False)
        return placed.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])

    layers[0].register_forward_pre_hook(split)
    layers[-1].register_forward_hook(gather)
