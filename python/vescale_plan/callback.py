"""Watches a training of Hugging Face's Trainer, or of accelerate's own loop, against a plan."""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from .strategy import GROUPS_DIFFER, PlanError

if TYPE_CHECKING:
    from ._native import Plan


class StepWatch:
    """Compares the time of steps with a plan's prediction: call `step()` after every optimizer step.

    ```
    watch = StepWatch(plan)
    for batch in loader:
        ...
        optimizer.step()
        watch.step()
    ```

    It warns once when the median of the last `window` steps leaves the prediction's interval.
    """

    def __init__(self, plan: Plan, *, warmup: int = 2, window: int = 10) -> None:
        self._expected = float(plan.predicted["step_time_s"])
        interval: Any = plan.predicted.get("step_time_interval_s") or (self._expected, self._expected)
        self._interval: Tuple[float, float] = (float(interval[0]), float(interval[1]))
        self._left, self._window = warmup, window
        self._began: Optional[float] = None
        self._warned = False
        self.times: List[float] = []

    def step(self) -> None:
        """Marks the end of a step."""
        now = time.perf_counter()
        if self._began is not None:
            if self._left > 0:
                self._left -= 1
            else:
                self.times.append(now - self._began)
                self._check()
        self._began = now

    def pause(self) -> None:
        """Leaves out what follows until the next step ends: evaluation, or a checkpoint."""
        self._began = None

    def measured(self) -> Dict[str, float]:
        """The median step so far, the predicted one and their ratio; empty during the warm-up."""
        if not self.times:
            return {}
        median = statistics.median(self.times)
        return {
            "step_time_s": median,
            "predicted_step_time_s": self._expected,
            "step_time_ratio": median / self._expected,
        }

    def _check(self) -> None:
        if self._warned or len(self.times) < self._window:
            return
        median = statistics.median(self.times[-self._window :])
        low, high = self._interval
        if not low <= median <= high:
            self._warned = True
            warnings.warn(
                f"the last {self._window} steps took {median:.3g} s, the plan predicts {self._expected:.3g} s "
                f"({low:.3g} to {high:.3g} s); `vescale_plan.diagnose` says where a gap may lie",
                stacklevel=2,
            )


def trainer_callback(plan: Plan, *, warmup: int = 2, window: int = 10) -> Any:
    """A callback for Hugging Face's `Trainer` that watches its steps as `StepWatch` does.

    The Trainer's logs get `predicted_step_time_s`, `step_time_s` and `step_time_ratio`. A batch other than the plan's is
    refused when training begins.

    Raises:
        PlanError: the plan has several groups of replicas; the ranks of a Trainer are all alike.
    """
    if plan.groups:
        raise PlanError(GROUPS_DIFFER)
    from transformers import TrainerCallback

    watch = StepWatch(plan, warmup=warmup, window=window)
    expected = plan.workload["global_batch"]

    class PlanCallback(TrainerCallback):
        """Watches the Trainer's steps against a plan."""

        def __init__(self) -> None:
            self.watch = watch

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ranks = _data_parallel_ranks(args, kwargs.get("model"))
            batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks
            if batch != expected:
                raise PlanError(
                    f"the Trainer's step has {batch} sequences ({args.per_device_train_batch_size} x "
                    f"{args.gradient_accumulation_steps} micro-batches x {ranks} data-parallel ranks), the plan's {expected}"
                )
            watch.step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.step()

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.pause()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.pause()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            # Later callbacks read `logs`; the history has a copy of it by now.
            for entry in (logs, state.log_history[-1] if state.log_history else None):
                if entry is not None:
                    entry.update(watch.measured())

    return PlanCallback()


def _data_parallel_ranks(args: Any, model: Any) -> int:
    """Ranks of a Trainer that take sequences of their own, as transformers 5.23 counts them (trainer.py,
    `get_total_train_batch_size`): tensor and context parallelism share them."""
    # The Trainer's arguments do not hold what accelerate's launcher set.
    accelerate: Any = importlib.import_module("accelerate.state")
    sizes: Any = accelerate.AcceleratorState._shared_state.get("parallelism_config")
    tp = getattr(model, "_tp_size", None)
    if tp is None and (deepspeed := getattr(args, "hf_deepspeed_config", None)):
        tp = deepspeed.config.get("tensor_parallel", {}).get("autotp_size", 1)
    if tp is None:
        tp = getattr(sizes, "tp_size", 1)
    return int(args.world_size // tp // getattr(sizes, "cp_size", 1) // getattr(sizes, "sp_size", 1))
