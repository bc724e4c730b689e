"""Cuts a model into pipeline stages that run its own, unmodified forward."""

from __future__ import annotations

import copy
from typing import Any, List, Sequence

import torch
from torch import nn

from . import anatomy
from .anatomy import Anatomy
from .strategy import PlanError


class Absent(nn.Module):
    """Replaces a module that belongs to another stage: passes its first argument on.

    With it, names and indices of the modules that are here stay those of the whole model.
    """

    def forward(self, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return x


class AbsentPositions(nn.Module):
    """A position embedding that adds nothing: the first stage has added it."""

    def forward(self, ids: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        # Booleans take on the type of what they are added to.
        return torch.zeros((*ids.shape, 1), dtype=torch.bool, device=ids.device)


class Stage(nn.Module):
    """One virtual stage: token ids or hidden states in, hidden states or logits out."""

    def __init__(self, model: nn.Module, index: int, count: int):
        super().__init__()
        self.model = model
        self.index = index
        self.is_first = index == 0
        self.is_last = index == count - 1

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        entry = "input_ids" if self.is_first else "inputs_embeds"
        output: torch.Tensor = self.model(**{entry: x}, use_cache=False, **kwargs).logits
        # Zero-bubble schedules detach what a stage sends in place, which a view does not allow.
        return output.clone() if output._is_view() and not self.is_last else output


def place(stage: int, ranks: int, v_shaped: bool) -> int:
    """The pipeline rank of a virtual stage."""
    lap, position = divmod(stage, ranks)
    return ranks - 1 - position if v_shaped and lap % 2 else position


def cut(model: nn.Module, sizes: Sequence[int], mine: Sequence[int]) -> List[Stage]:
    """Cuts `model` into stages with the layers that `sizes` gives, and returns the stages `mine`.

    Parameters are shared with `model`, not copied; what no stage of this rank needs is freed when
    the caller drops `model`.
    """
    parts = anatomy.find(model)
    if sum(sizes) != len(parts.layers):
        raise PlanError(f"stages {list(sizes)} hold {sum(sizes)} layers; the model has {len(parts.layers)}")
    if len(sizes) == 1:
        return [Stage(model, 0, 1)]
    if parts.head is None or parts.head_name is None:
        raise PlanError(f"pp: {type(model).__name__} has no output projection (looked for {', '.join(anatomy.HEADS)})")
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    stages = []
    for index in mine:
        # Hooks and settings are copied, tensors are not.
        part = copy.deepcopy(model, dict(shared))
        _keep(anatomy.find(part), sizes, index)
        if parts.tied and index == len(sizes) - 1:
            # Each stage owns its parameters; the gradients of the two copies are added.
            head = getattr(part, parts.head_name)
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        stages.append(Stage(part, index, len(sizes)))
    return stages


def _keep(parts: Anatomy, sizes: Sequence[int], index: int) -> None:
    """Replaces what is not on stage `index`."""
    start = sum(sizes[:index])
    for i in range(len(parts.layers)):
        if not start <= i < start + sizes[index]:
            parts.layers[i] = Absent()
    if index > 0:
        setattr(parts.base, parts.embedding_name, Absent())
        if parts.positions_name:
            setattr(parts.base, parts.positions_name, AbsentPositions())
        if parts.dropout_name:
            setattr(parts.base, parts.dropout_name, Absent())
    if index < len(sizes) - 1:
        if parts.norm_name:
            setattr(parts.base, parts.norm_name, Absent())
        if parts.head_name:
            setattr(parts.model, parts.head_name, Absent())
