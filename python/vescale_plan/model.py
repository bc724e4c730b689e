"""The model that `parallelize` returns: its call is one training step's forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from . import anatomy
from . import batch as batches
from .context_parallel import ContextParallel
from .groups import Place
from .pipeline import Pipeline
from .stages import Stage
from .strategy import PlanError


class StepOutput(Dict[Any, torch.Tensor]):
    """What a step returns: `output.loss`, `output["loss"]` or `output[0]`."""

    @property
    def loss(self) -> torch.Tensor:
        """Mean cross entropy over the global batch, equal on every rank."""
        return self["loss"]

    def __getitem__(self, key: Any) -> torch.Tensor:
        return super().__getitem__("loss" if key == 0 else key)


class _Ran(torch.autograd.Function):
    """The loss of a step whose backward has run: `loss.backward()` has nothing left to do."""

    @staticmethod
    def forward(_ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        if grad_outputs[0].item() != 1.0:
            raise PlanError(
                "the loss of a parallelized model is back-propagated as it is: micro-batches have already run "
                "backward; scale gradients or the learning rate instead"
            )
        return torch.zeros(1), None


class ParallelModel(nn.Module):
    """A model under a plan. Use it in the loop that trained the original:

    ```
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    With gradients enabled the call runs all micro-batches forward and backward, as the plan's
    schedule says, and adds to the gradients; `loss.backward()` then checks only that the loss was
    not changed. Under `torch.no_grad()` it runs forward.
    """

    def __init__(
        self,
        stages: List[Stage],
        place: Place,
        fsdp: List[List[FSDPModule]],
        tied: bool,
        context: Optional[ContextParallel],
        whole_batch: bool,
    ):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._own = list(stages)
        self.place = place
        self.strategy = place.strategy
        self._fsdp = fsdp
        self._whole_batch = whole_batch
        self._context = context
        self._pipeline = Pipeline(stages, place, tied) if self.strategy.pp > 1 else None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with the plan's axes by name: `model.device_mesh["tp"]`."""
        return self.place.mesh

    def forward(self, *, input_ids: torch.Tensor, labels: Optional[torch.Tensor] = None, **extra: Any) -> StepOutput:
        """One step on a batch: every rank's gradients, and the mean loss over the global batch."""
        given: Dict[str, Any] = {"input_ids": input_ids, "labels": labels, **extra}
        share = batches.take(given, self.strategy, self.place.dp_rank, self.place.device, self._whole_batch)
        if not self._whole_batch:
            for axis in ("dp_shard", "dp_replicate"):
                dist.all_reduce(share.tokens, group=self.place.group(axis))
        backward = torch.is_grad_enabled()
        with contextlib.ExitStack() as around:
            if self._context is not None:
                share = around.enter_context(self._context.shard(share))
            total = self._pipeline.run(share, backward) if self._pipeline else self._accumulate(share, backward)
        for axis in ("dp_shard", "dp_replicate", "cp"):
            dist.all_reduce(total, group=self.place.group(axis))
        loss = total / share.tokens
        if backward:
            self._lay_out_gradients()
            if self._pipeline:
                self._pipeline.share_tied_gradients()
            loss = _Ran.apply(torch.zeros(1, requires_grad=True), loss)
        return StepOutput(loss=loss)

    def _lay_out_gradients(self) -> None:
        """Lays gradients out as their parameters: adds up what tensor-parallel ranks contributed to
        parameters that all of them hold."""
        for parameter in self.parameters():
            grad = parameter.grad
            placements = getattr(parameter, "placements", None)
            if isinstance(grad, DTensor) and grad.placements != placements:
                parameter.grad = grad.redistribute(placements=placements)

    def _accumulate(self, share: batches.Share, backward: bool) -> torch.Tensor:
        """Runs micro-batches one after the other, without a pipeline; returns the sum of their losses."""
        stage, count = self.stages[0], self.strategy.num_micro_batches
        total = torch.zeros((), device=self.place.device)
        for i, part in enumerate(share.micro_batches(count)):
            last = i == count - 1
            for module in self._fsdp[0]:
                # ZeRO-1 keeps whole gradients until the last micro-batch; from ZeRO-2 on, shards.
                module.set_requires_gradient_sync(last or self.strategy.zero >= 2, recurse=False)
                module.set_is_last_backward(last)
                module.set_reshard_after_backward(last or self.strategy.reshard_after_forward, recurse=False)
            loss = batches.loss_sum(stage(part.ids, **part.extra), part.targets)
            if backward:
                back: Callable[[], None] = (loss / part.tokens).backward
                back()
            total += loss.detach()
        return total

    def original_parameters(self) -> Iterator[Tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the original model.

        Two may have the same name: where the head is tied to the embedding, the first and the last
        stage of a pipeline have a copy each.
        """
        copy = self.tied_copy()
        for stage in self._own:
            for name, parameter in stage.model.named_parameters():
                name = name.replace("_checkpoint_wrapped_module.", "")
                yield (anatomy.find(stage.model).embedding_weight if parameter is copy else name), parameter

    def tied_copy(self) -> Optional[nn.Parameter]:
        """The head of the last stage, where it is a copy of the first stage's embedding."""
        return self._pipeline.second_copy() if self._pipeline else None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales gradients so that their norm over the whole model is at most `max_norm`.

        `torch.nn.utils.clip_grad_norm_` would see only this rank's pipeline stages.
        """
        copy = self.tied_copy()
        ranks = self.strategy.world // self.strategy.pp
        square = torch.zeros((), device=self.place.device)
        grads = []
        for parameter in self.parameters():
            if parameter.grad is None:
                continue
            local, shards = _whole_terms(parameter.grad)
            grads.append(local)
            if parameter is not copy:
                # Every rank adds its part; what several ranks hold is added once.
                square += local.float().square().sum() * (shards / ranks)
        dist.all_reduce(square)
        norm = square.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for local in grads:
            local.mul_(factor)
        return norm


def _whole_terms(grad: torch.Tensor) -> Tuple[torch.Tensor, int]:
    """A gradient's local part, with how many ranks hold different parts of it."""
    if not isinstance(grad, DTensor):
        return grad, 1
    if any(placement.is_partial() for placement in grad.placements):
        raise PlanError("a gradient is still a partial sum")
    shards = 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements):
        shards *= 1 if placement.is_replicate() else size
    return grad.to_local(), shards
