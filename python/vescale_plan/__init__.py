"""Plans how to shard LLM training, and applies the plan to a PyTorch model."""

from .strategy import PlanError, Strategy

__all__ = ["PlanError", "Strategy", "parallelize"]


def __getattr__(name):
    # PyTorch is needed only by those who apply a plan.
    if name == "parallelize":
        from .apply import parallelize

        globals()["parallelize"] = parallelize
        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
