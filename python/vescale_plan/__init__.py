"""Plans how to shard LLM training, and applies the plan to a PyTorch model.

    plan = generate_plan(model, cluster="dgx-h100", gpus=8)
    model, optimizer = parallelize(plan, model, torch.optim.AdamW)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import Plan, __version__
    from .apply import parallelize
    from .checkpoint import load, save
    from .planning import estimate, generate_plan, generate_plans
    from .strategy import PlanError, Strategy

__all__ = [
    "Plan",
    "PlanError",
    "Strategy",
    "estimate",
    "generate_plan",
    "generate_plans",
    "load",
    "parallelize",
    "save",
]

# Planning needs no PyTorch, and applying a plan file needs no planner: each is imported when used.
_HOMES = {
    "Plan": "_native",
    "__version__": "_native",
    "PlanError": "strategy",
    "Strategy": "strategy",
    "estimate": "planning",
    "generate_plan": "planning",
    "generate_plans": "planning",
    "load": "checkpoint",
    "parallelize": "apply",
    "save": "checkpoint",
}


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
