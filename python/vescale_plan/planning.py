"""Planning from Python: `generate_plan`, `generate_plans` and `estimate`."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

from . import _native
from ._native import Plan
from .strategy import PlanError, Strategy

DEFAULT_RUNTIME = "torchtitan"
DEFAULT_CLUSTER = "dgx-h100"
DEFAULT_TOKENS_PER_STEP = 4 << 20
# What `parallelize` applies; a plan for another runtime is not held to it.
APPLIED = {"ep": 1, "etp": 1, "cp_kind": "all_gather"}


def generate_plan(
    model_or_config: Any,
    *,
    cluster: str = DEFAULT_CLUSTER,
    gpus: Optional[int] = None,
    seq_len: int = 8192,
    global_batch: Optional[int] = None,
    precision: str = "bf16",
    runtime: Optional[str] = None,
    headroom: float = 0.05,
    objective: str = "time",
    **constraints: Any,
) -> Plan:
    """The best plan for training a model on a cluster.

    Args:
        model_or_config: a model with a `config` (HF), a config, its dictionary, the name of a
            preset, or the path of a `config.json`.
        cluster: cluster preset or file; `"local"` is this machine as `vescale-plan profile`
            measured it.
        gpus: devices; by default the ranks that torchrun started.
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer step; by default about 4 Mi tokens.
        precision: `"bf16"`, `"fp32"`, `"fp16"` or `"fp8"`.
        runtime: the training system the plan is for. By default PyTorch's own parts, restricted to
            what `parallelize` applies.
        headroom: share of device memory to leave free.
        objective: `"time"` or `"memory"`.
        **constraints: `tp=8` fixes a dimension, `schedule=("1f1b", "zb-v")` allows some values,
            `max_tp=8` and `min_pp=2` bound it, `forbid=("cp", "pp")` keeps dimensions at 1.

    Raises:
        ValueError: unknown names, with the nearest known one; constraints that make no sense; no
            plan fits.
    """
    given = _given(model_or_config, cluster, gpus, seq_len, global_batch, precision, runtime, headroom)
    return _search(given, runtime, objective, 1, constraints)[0]


def generate_plans(
    model_or_config: Any,
    *,
    top: int = 5,
    cluster: str = DEFAULT_CLUSTER,
    gpus: Optional[int] = None,
    seq_len: int = 8192,
    global_batch: Optional[int] = None,
    precision: str = "bf16",
    runtime: Optional[str] = None,
    headroom: float = 0.05,
    objective: str = "time",
    **constraints: Any,
) -> List[Plan]:
    """The best plans, the best first: at most `top`, fewer where fewer fit. Other arguments are those of
    `generate_plan`.

    Raises:
        ValueError: as `generate_plan`.
    """
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise PlanError(f"top {top!r}: expected a whole number of at least 1")
    given = _given(model_or_config, cluster, gpus, seq_len, global_batch, precision, runtime, headroom)
    return _search(given, runtime, objective, top, constraints)


def _search(
    given: Dict[str, Any], runtime: Optional[str], objective: str, top: int, constraints: Mapping[str, Any]
) -> List[Plan]:
    if runtime is None:
        applied = {k: v for k, v in APPLIED.items() if not _named(k, constraints)}
        # A plan without context parallelism has no kind of it.
        if "cp" in constraints.get("forbid", ()) or 1 in (constraints.get("cp"), constraints.get("max_cp")):
            applied.pop("cp_kind", None)
        constraints = {**applied, **constraints}
    fix, at_least, at_most, forbid = _constraints(constraints)
    return _native.search(given, fix, (at_least, at_most), forbid, objective, top)


def estimate(
    model_or_config: Any,
    strategy: Any,
    *,
    cluster: str = DEFAULT_CLUSTER,
    gpus: Optional[int] = None,
    seq_len: int = 8192,
    global_batch: Optional[int] = None,
    precision: str = "bf16",
    runtime: Optional[str] = None,
    headroom: float = 0.05,
) -> Plan:
    """The plan of one strategy, such as `"tp=8,pp=4,mbs=1"`, with its predicted time and memory.

    What the text leaves out is filled in. A `Plan` stands for its own strategy. Other arguments are
    those of `generate_plan`.

    Raises:
        ValueError: unknown keys, with the nearest known one; a strategy that is not legal.
    """
    text = getattr(strategy, "strategy_text", strategy)
    if not isinstance(text, str):
        raise PlanError(f"strategy {strategy!r}: expected text such as tp=2,pp=2, or a Plan")
    given = _given(model_or_config, cluster, gpus, seq_len, global_batch, precision, runtime, headroom)
    return _native.estimate(given, text)


def _given(model, cluster, gpus, seq_len, global_batch, precision, runtime, headroom) -> Dict[str, Any]:
    if gpus is None:
        world = os.environ.get("WORLD_SIZE")
        if world is None:
            raise PlanError("gpus: how many devices? Pass gpus=, or start with torchrun")
        gpus = int(world)
    for name, value in {"gpus": gpus, "seq_len": seq_len, "global_batch": global_batch}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PlanError(f"{name} {value!r}: expected a whole number of at least 1")
    name, config = _model(model)
    return {
        "model": name,
        "config": config,
        "cluster": cluster,
        "gpus": gpus,
        "runtime": runtime or DEFAULT_RUNTIME,
        "seq_len": seq_len,
        "global_batch": global_batch or _default_batch(gpus, seq_len),
        "precision": precision,
        "headroom": headroom,
    }


def _default_batch(gpus: int, seq_len: int) -> int:
    """About 4 Mi tokens, and at least one sequence per device, in multiples that divide."""
    unit = gpus & -gpus
    odd = gpus // unit
    sequences = max(DEFAULT_TOKENS_PER_STEP // seq_len, 1, min(unit, 2048))
    return -(-sequences // odd) * odd


def _model(model: Any) -> Tuple[str, Optional[str]]:
    """Name of a model and, when it is in memory, its configuration as JSON."""
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model), None
    config = getattr(model, "config", model)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise PlanError(f"{type(model).__name__}: expected a model with a config, a config, a preset or a path")
    text = json.dumps(config, default=str, sort_keys=True, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{config.get('model_type', 'model')}-{digest}", text


def _constraints(given: Mapping[str, Any]) -> Tuple[List[str], List[str], List[str], List[str]]:
    fix: List[str] = []
    at_least: List[str] = []
    at_most: List[str] = []
    forbid: List[str] = []
    for key, value in given.items():
        words = [_word(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
        if key == "forbid":
            forbid.extend(words)
        elif key.startswith("min_"):
            at_least.append(f"{key[4:]}={'|'.join(words)}")
        elif key.startswith("max_"):
            at_most.append(f"{key[4:]}={'|'.join(words)}")
        else:
            fix.append(f"{key}={'|'.join(words)}")
    return fix, at_least, at_most, forbid


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _named(key: str, given: Mapping[str, Any]) -> bool:
    return any(k in (key, f"min_{key}", f"max_{key}") for k in given)


__all__ = ["Plan", "Strategy", "estimate", "generate_plan", "generate_plans"]
