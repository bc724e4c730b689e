"""Cuts this rank's share out of the batch that the training loop passes."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Tuple

import torch

from .strategy import PlanError, Strategy

IGNORED = -100


@dataclasses.dataclass
class Share:
    """This rank's sequences with the targets of each token."""

    ids: torch.Tensor
    targets: torch.Tensor
    extra: Dict[str, torch.Tensor]
    tokens: torch.Tensor

    def micro_batches(self, count: int) -> List["Share"]:
        """The share in `count` equal parts, in order; `tokens` stays that of the whole step."""
        ids, targets = self.ids.chunk(count), self.targets.chunk(count)
        extra = [{k: v.chunk(count)[i] for k, v in self.extra.items()} for i in range(count)]
        return [Share(i, t, e, self.tokens) for i, t, e in zip(ids, targets, extra)]


def take(batch: Dict[str, Any], strategy: Strategy, dp_rank: int, device: torch.device, whole: bool) -> Share:
    """Cuts this rank's share out of a batch, or checks that it is one.

    `whole`: every rank passes the same global batch; otherwise each passes its own share.
    """
    batch = {k: v for k, v in batch.items() if v is not None}
    for needed in ("input_ids", "labels"):
        if not isinstance(batch.get(needed), torch.Tensor):
            raise PlanError(f"the batch has no {needed}; a training step needs input_ids and labels")
    ids, labels = batch.pop("input_ids"), batch.pop("labels")
    if ids.ndim != 2 or labels.shape != ids.shape:
        raise PlanError(f"input_ids {tuple(ids.shape)} and labels {tuple(labels.shape)}: expected (sequences, tokens)")
    parts = strategy.dp if whole else 1
    expected = strategy.global_batch // (1 if whole else strategy.dp)
    if ids.shape[0] != expected:
        what = "global batch" if whole else "share of each rank"
        raise PlanError(
            f"the batch has {ids.shape[0]} sequences; the plan's {what} is {expected} (micro_batch "
            f"{strategy.micro_batch} x num_micro_batches {strategy.num_micro_batches} x ranks {parts})"
        )
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.shape[:1] != ids.shape[:1]:
            raise PlanError(f"batch entry {name}: expected a tensor with one row per sequence")
    # The target of a token is the next label, as in HF's causal loss.
    targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    tokens = (targets != IGNORED).sum().clamp(min=1).to(device)
    rank = dp_rank if whole else 0

    def mine(rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(parts)[rank].to(device)

    return Share(mine(ids), mine(targets), {k: mine(v) for k, v in batch.items()}, tokens)


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies of all tokens that count, in f32."""
    flat = logits.float().reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")


def shapes(share: Share, micro_batches: int) -> Tuple[int, int]:
    """Sequences and tokens of one micro-batch."""
    return share.ids.shape[0] // micro_batches, share.ids.shape[1]
