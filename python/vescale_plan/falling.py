"""How many layers a stage recomputes where later pipeline ranks recompute fewer.

A later rank has fewer micro-batches in flight, so it need not recompute as many layers to keep as much as the first rank
does. The counts are those of the Rust crate `plans` (`plans/src/falling.rs`).
"""

from __future__ import annotations

from typing import Sequence

from .strategy import PlanError, Strategy

SCHEDULES = ("1f1b", "interleaved", "zb-h1")


def check(strategy: Strategy) -> None:
    """Refuses counts that fall where no later rank has fewer micro-batches in flight."""
    falls = strategy.recompute.startswith("falling:")
    if falls and (strategy.pp == 1 or strategy.schedule not in SCHEDULES):
        raise PlanError(
            f"strategy.recompute is {strategy.recompute!r}, which needs pp of at least 2 and a schedule of "
            f"{', '.join(SCHEDULES)}; expected layers:{_of_first(strategy)}"
        )


def recomputed(strategy: Strategy, sizes: Sequence[int], stage: int) -> int:
    """Layers that a stage recomputes under `recompute="falling:N"`; `sizes` has every stage's layers."""
    kept = max(0, sizes[0] - _of_first(strategy)) * _in_flight(strategy, 0)
    return max(0, sizes[stage] - kept // _in_flight(strategy, stage % strategy.pp))


def _of_first(strategy: Strategy) -> int:
    return int(strategy.recompute.split(":", 1)[1])


def _in_flight(strategy: Strategy, rank: int) -> int:
    """Forward passes without their backward at a rank's fullest moment, over all its stages."""
    ranks, stages, batches = strategy.pp, strategy.vpp, strategy.num_micro_batches
    if strategy.schedule != "interleaved":
        return min(ranks - rank, batches)
    if batches == ranks:
        return stages * batches
    return min(2 * (ranks - rank - 1) + (stages - 1) * ranks + 1, stages * batches)
