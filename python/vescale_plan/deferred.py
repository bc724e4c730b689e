"""Models on the meta device: weights are made after sharding, one part at a time."""

from __future__ import annotations

import copy
from typing import Callable, Dict, Iterator, Sequence, Tuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from . import anatomy
from .anatomy import FUSED_QKV, Anatomy, SplitQkv
from .stages import Stage
from .strategy import PlanError


class Deferred:
    """What a model on the meta device needs to be made later: its parts, without their weights."""

    def __init__(self, parts: Anatomy):
        model = parts.model
        if not hasattr(model, "_init_weights"):
            raise PlanError(f"{type(model).__name__} is on the meta device and has no _init_weights to make its weights")
        if any(not p.is_meta for p in model.parameters()):
            raise PlanError(f"{type(model).__name__}: some parameters are on the meta device and some are not")
        self._model = _without_modules(model)
        self._embedding = parts.embedding_weight.rsplit(".", 1)[0]
        self._head = parts.head_name if parts.tied else None
        self._units = list(_units(parts))

    def fill(self, stages: Sequence[Stage], seed: int, device: torch.device) -> None:
        """Gives the stages their weights and buffers, the same under every plan."""
        for stage in stages:
            tied = anatomy.find(stage.model).tied
            stage.to_empty(device=device)
            if tied:
                anatomy.find(stage.model).tie()
        for number, (name, unit) in enumerate(self._units):
            names = [name, self._head] if self._head and name == self._embedding else [name]
            targets = [t for stage in stages for n in names for t in _targets(stage, n)]
            if not targets:
                continue
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(seed + number)
                made = self._make(name, unit)
                for key, value in _values(made):
                    for held in targets:
                        if key in held:
                            _fill(held[key], value)

    def _make(self, name: str, unit: nn.Module) -> nn.Module:
        unit = copy.deepcopy(unit).to_empty(device="cpu")
        unit.apply(cast("Callable[[nn.Module], None]", self._model._init_weights))
        # Some models make weights by their names in the whole model.
        root = _without_modules(self._model)
        owner: nn.Module = root
        *path, last = name.split(".")
        for part in path:
            owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.add_module(last, unit)
        cast("Callable[[nn.Module], None]", root._init_weights)(root)
        return unit


def _units(parts: Anatomy) -> Iterator[Tuple[str, nn.Module]]:
    """What is made at once, with its name: each child of a layer, and each other module by itself.

    Models initialise some weights of a projection from the attention or MLP that it is in.
    """
    layers = f"{parts.base_name}.{parts.layers_name}."
    head = parts.head if parts.tied else None
    for name, module in parts.model.named_modules():
        inside = name[len(layers) :].split(".") if name.startswith(layers) else []
        if len(inside) == 2:
            yield name, copy.deepcopy(module)
        elif len(inside) < 2 and module is not head:
            # A tied head is made with the embedding.
            own = _without_modules(module)
            if next(own.parameters(), None) is not None or next(own.buffers(), None) is not None:
                yield name, copy.deepcopy(own)


def _without_modules(model: nn.Module) -> nn.Module:
    """The module with its own parameters only."""
    bare = copy.copy(model)
    bare._modules = {}
    return bare


def _values(unit: nn.Module) -> Iterator[Tuple[str, torch.Tensor]]:
    """Weights and buffers of a unit, by their names after fused projections were split."""
    for name, child in list(unit.named_children()):
        if name in FUSED_QKV:
            setattr(unit, name, SplitQkv(child))
    yield from unit.named_parameters()
    yield from unit.named_buffers()


def _targets(stage: Stage, name: str) -> Iterator[Dict[str, torch.Tensor]]:
    """Where a unit's values go on this stage, by their names within the unit."""
    prefix = f"{name}."
    found = {}
    for key, tensor in (*stage.model.named_parameters(), *stage.model.named_buffers()):
        key = key.replace("_checkpoint_wrapped_module.", "")
        if key.startswith(prefix):
            found[key[len(prefix) :]] = tensor
    if found:
        yield found


def _fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies this rank's part of a whole tensor."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(whole.shape, target.device_mesh, target.placements)
    local = target.to_local()
    if local.numel():
        local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))])
