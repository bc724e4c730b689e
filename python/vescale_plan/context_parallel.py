"""Context parallelism: each rank computes a part of every sequence.

Keys and values are gathered before attention (`all_gather`, as Llama 3 was trained), or ranks exchange parts of sequences
for heads, so that each attends over whole sequences with some heads (`all_to_all`, as Ulysses does). A rank holds an early and a
late part of the sequence, so that causal attention costs every rank the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any, Iterator, Optional, Tuple

import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.nn.attention.bias import causal_lower_right

from . import anatomy
from .anatomy import Anatomy
from .batch import Share
from .groups import Place
from .strategy import PlanError, Strategy

# Each model registers attention under its own name, because attention holds the current batch.
_NUMBERS = itertools.count()


APPLIED = ("all_gather", "all_to_all")


def check(strategy: Strategy, parts: Anatomy) -> None:
    """Refuses what is not applied."""
    if strategy.cp == 1:
        return
    if strategy.cp_kind not in APPLIED:
        raise PlanError(f"cp_kind {strategy.cp_kind} is not applied; {' and '.join(APPLIED)} are")
    if strategy.cp_kind == "all_to_all":
        anatomy.check_heads(parts, strategy.cp * strategy.tp, "cp * tp")
    if strategy.dp_replicate > 1:
        raise PlanError("dp_replicate > 1 with cp > 1 is not applied; use dp_shard")
    config = getattr(parts.model, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        raise PlanError(f"cp={strategy.cp} needs a model whose attention implementation is sdpa")
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    if any(kind != "full_attention" for kind in kinds):
        raise PlanError(f"cp={strategy.cp}: every layer must have full attention")


class ContextParallel:
    """Shards sequences, and gathers keys and values in attention."""

    def __init__(self, place: Place):
        self._place = place
        self._positions = torch.empty(0)
        self._order = torch.empty(0)
        # How many keys the early part of this rank's tokens sees, and how many the late one.
        self._ends: Tuple[int, ...] = ()

    def install(self, model: nn.Module) -> None:
        """Makes the model's attention ours, through HF's registry of implementations."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = f"vescale_plan_context_parallel_{next(_NUMBERS)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation = name

    @contextlib.contextmanager
    def shard(self, share: Share) -> Iterator[Share]:
        """The tokens of this rank, with their positions."""
        if "attention_mask" in share.extra or "position_ids" in share.extra:
            raise PlanError("context parallelism takes no attention_mask or position_ids; mask labels instead")
        ranks, rank = self._place.strategy.cp, self._place.rank("cp")
        tokens = share.ids.shape[1]
        if tokens % (2 * ranks):
            raise PlanError(f"cp={ranks} needs a multiple of {2 * ranks} tokens; got {tokens}")
        every = torch.arange(tokens, device=share.ids.device).chunk(2 * ranks)
        own = [torch.cat((every[r], every[2 * ranks - 1 - r])) for r in range(ranks)]
        self._positions = own[rank]
        self._order = torch.cat(own).argsort()
        part = tokens // (2 * ranks)
        self._ends = ((rank + 1) * part, (2 * ranks - rank) * part)
        extra = {**share.extra, "position_ids": self._positions.expand(share.ids.shape[0], -1).contiguous()}
        yield dataclasses.replace(
            share, ids=share.ids[:, self._positions], targets=share.targets[:, self._positions], extra=extra
        )

    def _attend(
        self,
        _module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: Any,
        dropout: float = 0.0,
        scaling: Optional[float] = None,
        **_kwargs: Any,
    ) -> Tuple[torch.Tensor, None]:
        if self._place.strategy.cp_kind == "all_to_all":
            whole = torch.nn.functional.scaled_dot_product_attention(
                self._to_heads(query),
                self._to_heads(key),
                self._to_heads(value),
                dropout_p=dropout,
                is_causal=True,
                scale=scaling,
                enable_gqa=key.shape[1] != query.shape[1],
            )
            return self._to_tokens(whole).transpose(1, 2).contiguous(), None
        keys, values = self._gather(key), self._gather(value)
        results = []
        for queries, end in zip(query.chunk(2, dim=2), self._ends):
            # Each part sees the keys up to its own last one. Flash attention has a kernel for that, and takes no other mask.
            results.append(
                torch.nn.functional.scaled_dot_product_attention(
                    queries,
                    keys[:, :, :end],
                    values[:, :, :end],
                    attn_mask=causal_lower_right(queries.shape[2], end),
                    dropout_p=dropout,
                    scale=scaling,
                    enable_gqa=key.shape[1] != query.shape[1],
                )
            )
        return torch.cat(results, dim=2).transpose(1, 2).contiguous(), None

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """The keys or values of whole sequences, in order."""
        whole: torch.Tensor = all_gather_tensor_autograd(x.contiguous(), 2, self._place.group("cp"))
        return whole.index_select(2, self._order)

    def _to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Whole sequences of this rank's heads, from a part of every sequence of all heads."""
        ranks = self._place.strategy.cp
        sent = torch.stack(x.chunk(ranks, dim=1))
        parts = self._exchange(sent)
        return torch.cat(parts.unbind(), dim=2).index_select(2, self._order)

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all heads, from whole sequences of its heads: the inverse of `_to_heads`."""
        ranks = self._place.strategy.cp
        sent = torch.stack(x.index_select(2, self._order.argsort()).chunk(ranks, dim=2))
        return torch.cat(self._exchange(sent).unbind(), dim=1)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        """Sends slice `i` to rank `i`, and receives one slice of each."""
        received: torch.Tensor = all_to_all_single_autograd(sent.contiguous(), None, None, self._place.group("cp"))
        return received
