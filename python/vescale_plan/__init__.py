"""Plans how to shard LLM training, and applies the plan to a PyTorch model.

    plan = generate_plan(model, cluster="dgx-h100", gpus=8)
    model, optimizer = parallelize(plan, model, torch.optim.AdamW)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._native import Answer, Plan, __version__
    from .apply import parallelize
    from .callback import StepWatch, trainer_callback
    from .checkpoint import load, save
    from .planning import Search, diagnose, estimate, generate_plan, search
    from .strategy import PlanError, Strategy

__all__ = [
    "Answer",
    "Plan",
    "PlanError",
    "Search",
    "StepWatch",
    "Strategy",
    "__version__",
    "diagnose",
    "estimate",
    "generate_plan",
    "load",
    "parallelize",
    "save",
    "search",
    "trainer_callback",
]

# Planning needs no PyTorch, and applying a plan file needs no planner: each is imported when used.
_HOMES = {
    "Answer": "_native",
    "Plan": "_native",
    "__version__": "_native",
    "PlanError": "strategy",
    "Strategy": "strategy",
    "Search": "planning",
    "diagnose": "planning",
    "estimate": "planning",
    "generate_plan": "planning",
    "search": "planning",
    "load": "checkpoint",
    "parallelize": "apply",
    "StepWatch": "callback",
    "trainer_callback": "callback",
    "save": "checkpoint",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
