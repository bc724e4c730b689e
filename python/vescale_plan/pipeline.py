"""Pipeline parallelism through `torch.distributed.pipelining`."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

from . import anatomy
from .batch import Share, loss_sum
from .groups import Place
from .stages import Stage, place as rank_of
from .shard import HALF
from .strategy import PlanError, Strategy

V_SHAPED = ("zb-v", "dualpipe-v")
# The class of `torch.distributed.pipelining.schedules` that runs each schedule.
CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def v_shaped(strategy: Strategy) -> bool:
    """Whether the second chunk of each rank runs back through the ranks."""
    return strategy.schedule in V_SHAPED


def available(schedule: str) -> bool:
    """Whether this torch runs a schedule. Versions without DualPipeV send from a rank to itself where a V turns."""
    return hasattr(schedules, CLASSES["dualpipe-v" if schedule in V_SHAPED else schedule])


def check(strategy: Strategy) -> None:
    """Refuses what torch's schedules cannot run."""
    if strategy.pp == 1:
        return
    if not available(strategy.schedule):
        raise PlanError(f"schedule {strategy.schedule}: torch {torch.__version__} does not run it; a newer torch does")
    if strategy.schedule in ("gpipe", "1f1b") and strategy.vpp > 1:
        raise PlanError(f"schedule {strategy.schedule} has one stage per rank; vpp is {strategy.vpp}")
    if v_shaped(strategy) and strategy.vpp != 2:
        raise PlanError(f"schedule {strategy.schedule} has two stages per rank; vpp is {strategy.vpp}")
    if strategy.schedule == "dualpipe-v" and strategy.num_micro_batches < 2 * strategy.pp:
        raise PlanError(
            f"schedule dualpipe-v needs at least {2 * strategy.pp} micro-batches; num_micro_batches is "
            f"{strategy.num_micro_batches}"
        )


class Pipeline:
    """The stages of this rank with the schedule that runs them."""

    def __init__(self, stages: List[Stage], place: Place, tied: bool):
        self.stages = stages
        self.place = place
        self.strategy = place.strategy
        self.tied = tied
        self._group = place.group("pp")
        self._by_shape: Dict[Tuple[int, int], Any] = {}
        self._tokens: Optional[torch.Tensor] = None

    def run(self, share: Share, backward: bool) -> torch.Tensor:
        """Runs the schedule; returns the sum of this pipeline's losses on each of its ranks."""
        runner = self._schedule(share)
        self._tokens = share.tokens
        losses: List[torch.Tensor] = []
        last = any(stage.is_last for stage in self.stages)
        inputs = (share.ids,) if any(stage.is_first for stage in self.stages) else ()
        target = share.targets if last else None
        step = runner.step if backward else runner.eval
        step(*inputs, target=target, losses=losses if last else None, **share.extra)
        total = torch.zeros((), device=self.place.device)
        if last:
            total = torch.stack([loss.detach() for loss in losses]).sum() * share.tokens
        source = rank_of(self._count() - 1, self.strategy.pp, v_shaped(self.strategy))
        dist.broadcast(total, src=dist.get_global_rank(self._group, source), group=self._group)
        return total

    def _count(self) -> int:
        return self.strategy.pp * self.strategy.vpp

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._tokens is not None, "set before the schedule runs"
        return loss_sum(logits, targets) / self._tokens

    def _schedule(self, share: Share) -> Any:
        """The schedule for batches of this shape: stages know what they send and receive."""
        count, tokens = self.strategy.num_micro_batches, share.ids.shape[1]
        key = (share.ids.shape[0], tokens)
        if key not in self._by_shape:
            rows = share.ids.shape[0] // count
            stages = [self._stage(stage, share.ids[:rows]) for stage in self.stages]
            self._by_shape[key] = _make(self.strategy, stages, count, self._loss)
        return self._by_shape[key]

    def _stage(self, stage: Stage, ids: torch.Tensor) -> pipelining.PipelineStage:
        config: Any = stage.model.config
        dtype = torch.bfloat16 if self.strategy.precision in HALF else next(stage.parameters()).dtype

        def meta(width: int) -> torch.Tensor:
            return torch.empty((*ids.shape, width), dtype=dtype, device="meta", requires_grad=True)

        return pipelining.PipelineStage(
            stage,
            stage.index,
            self._count(),
            self.place.device,
            input_args=ids.to("meta") if stage.is_first else meta(config.hidden_size),
            output_args=meta(config.vocab_size if stage.is_last else config.hidden_size),
            group=self._group,
        )

    def second_copy(self) -> Optional[nn.Parameter]:
        """This rank's head, when it is a copy of the embedding."""
        ends = self._tied_ends()
        return ends.get(self._count() - 1)

    def _tied_ends(self) -> Dict[int, nn.Parameter]:
        """The copies of a tied weight on this rank, by stage."""
        ends: Dict[int, nn.Parameter] = {}
        if not self.tied:
            return ends
        for stage in self.stages:
            parts = anatomy.find(stage.model)
            if stage.is_first:
                ends[stage.index] = getattr(parts.embedding, "weight")
            elif stage.is_last:
                ends[stage.index] = getattr(parts.head, "weight")
        return ends

    def share_tied_gradients(self) -> None:
        """Embedding on the first stage and head on the last are one weight: both get the sum of
        both gradients, added in the same order."""
        ends = self._tied_ends()
        if not ends:
            return
        mine = {index: _local(weight.grad) for index, weight in ends.items()}
        first, last = 0, self._count() - 1
        if len(mine) == 2:
            total = mine[first] + mine[last]
        else:
            (index, gradient), = mine.items()
            other = last if index == first else first
            peer = dist.get_global_rank(self._group, rank_of(other, self.strategy.pp, v_shaped(self.strategy)))
            theirs = torch.empty_like(gradient)
            operations = [
                dist.P2POp(dist.isend, gradient.contiguous(), peer, self._group),
                dist.P2POp(dist.irecv, theirs, peer, self._group),
            ]
            for request in dist.batch_isend_irecv(operations):
                request.wait()
            total = gradient + theirs if index == first else theirs + gradient
        for gradient in mine.values():
            gradient.copy_(total)


def _local(gradient: Optional[torch.Tensor]) -> torch.Tensor:
    assert gradient is not None, "backward has run"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _make(
    strategy: Strategy,
    stages: List[pipelining.PipelineStage],
    count: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Any:
    options: Dict[str, Any] = {"n_microbatches": count, "loss_fn": loss, "scale_grads": False}
    kind: Any = getattr(schedules, CLASSES[strategy.schedule])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    try:
        return kind(stages[0] if single else stages, **options)
    except ValueError as error:
        raise PlanError(f"schedule {strategy.schedule}: {error}") from None
