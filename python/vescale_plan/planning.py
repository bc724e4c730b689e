"""Planning from Python: `search`, `generate_plan`, `estimate` and `diagnose`."""

from __future__ import annotations

import hashlib
import inspect
import json
import operator
import os
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, SupportsIndex, Tuple, Union, cast

from . import _native  # pyright: ignore[reportPrivateUsage]
from ._native import Answer, Plan
from .strategy import GROUPS_DIFFER, PlanError

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")

# What a dimension may be held to: a value, or several.
Constraint = Union[str, int, bool, Sequence[Union[str, int, bool]]]

DEFAULT_RUNTIME = "torchtitan"
# Constraints on plans that `parallelize` applies; not used when a runtime is given.
APPLIED: Dict[str, Constraint] = {
    "ep": 1,
    "etp": 1,
    "cp_kind": "all_gather",
    "groups": 1,
    "offload": "none",
    "offload_layers": 0,
    "optim_states": "own",
    "dispatcher": "all_to_all",
    "graphs": "none",
}


class Search:
    """The plans of a search, the best first. They are searched for when they are asked for: iterate for as many as you
    need, or index; `best` is the first."""

    def __init__(self, found: _native.Search) -> None:
        self._search = found
        self._known: List[Plan] = []
        self._wanted = 4
        self._complete = False

    @property
    def best(self) -> Plan:
        """The best plan.

        Raises:
            ValueError: no plan fits; the message says what would make one possible.
        """
        return self[0]

    def __getitem__(self, index: int) -> Plan:
        at = operator.index(index)
        if at < 0:
            raise IndexError("plans are counted from the best, which is 0")
        if not self._seek(at + 1):
            raise IndexError(f"there are {len(self._known)} plans, counted from 0")
        return self._known[at]

    def __iter__(self) -> Iterator[Plan]:
        at = 0
        while self._seek(at + 1):
            yield self._known[at]
            at += 1

    def _seek(self, count: int) -> bool:
        """Whether there are `count` plans; searches for them unless they are known.

        Every search looks for four times as many plans as the one before, whatever is asked for: which of nearly equal plans are
        the last of a search depends on its number, and the order of plans must not depend on which were asked for first.
        """
        while len(self._known) < count and not self._complete:
            self._wanted *= 4
            found = self._search.first(self._wanted)
            known = {plan.id for plan in self._known}
            self._known.extend(plan for plan in found if plan.id not in known)
            self._complete = len(found) < self._wanted
        return len(self._known) >= count


def search(
    model_or_config: object,
    *,
    cluster: Union[str, "os.PathLike[str]"] = _native.CLUSTER,
    gpus: Optional[int] = None,
    seq_len: Optional[int] = None,
    global_batch: Optional[int] = None,
    lengths: Optional[str] = None,
    packing: Optional[str] = None,
    precision: str = "bf16",
    runtime: Optional[str] = None,
    headroom: float = _native.HEADROOM,
    objective: str = "time",
    **constraints: Constraint,
) -> Search:
    """The plans for training a model on a cluster, the best first.

    Args:
        model_or_config: a model with a `config` (HF), a config, its dictionary, the name of a
            preset, or the path of a `config.json`.
        cluster: cluster preset or file; `"local"` is this machine as `vescale-plan profile`
            measured it.
        gpus: devices; by default the ranks that torchrun started.
        seq_len: tokens per sequence; by default 8192, or fewer if the model's learned table of positions is shorter.
        global_batch: sequences per optimizer step; by default about 4 Mi tokens.
        lengths: lengths of the documents that sequences are made of: `"512:0.7,4k:0.3"`,
            `"lognormal:mean=1k,sigma=0.9"`, or a file with a length and a count on each line; by default each
            sequence is one document.
        packing: how documents of these `lengths` become sequences: `"within"` (the default) packs them and attends within
            each, `"across"` attends across them, `"padded"` pads each to the sequence length.
        precision: `"bf16"`, `"fp32"`, `"fp16"` or `"fp8"`.
        runtime: the training system the plan is for. By default PyTorch's own parts, restricted to
            what `parallelize` applies.
        headroom: share of device memory to leave free.
        objective: `"time"` or `"memory"`.
        **constraints: `tp=8` fixes a dimension, `schedule=("1f1b", "zb-v")` allows some values,
            `max_tp=8` and `min_pp=2` bound it, `forbid=("cp", "pp")` keeps dimensions at 1.

    Raises:
        ValueError: unknown names, with the nearest known one; constraints that make no sense.
    """
    documents = (lengths, packing)
    given = _given(model_or_config, cluster, gpus, seq_len, global_batch, documents, precision, runtime, headroom)
    if runtime is None:
        constraints = _applied(constraints)
    if objective not in ("time", "memory"):
        raise PlanError(f"objective {objective!r}: expected time or memory")
    fix, at_least, at_most, forbid = _constraints(constraints)
    return Search(_native.Search(given, fix, (at_least, at_most), forbid, objective))


def _best_of(search: Callable[P, Search]) -> Callable[P, Plan]:
    def generate_plan(*args: P.args, **kwargs: P.kwargs) -> Plan:
        """The best plan of `search`, which takes the same arguments.

        Raises:
            ValueError: as `search`; no plan fits.
        """
        return search(*args, **kwargs).best

    # What `help` shows.
    setattr(generate_plan, "__signature__", inspect.signature(search).replace(return_annotation=Plan))
    return generate_plan


generate_plan = _best_of(search)


def _applied(constraints: Mapping[str, Constraint]) -> Dict[str, Constraint]:
    """The constraints, with those added that `parallelize` needs to apply a plan."""
    applied = {k: v for k, v in APPLIED.items() if not _named(k, constraints)}
    # A plan without context parallelism has no kind of it.
    if "cp" in _words(constraints.get("forbid", ())) or 1 in (constraints.get("cp"), constraints.get("max_cp")):
        applied.pop("cp_kind", None)
    return {**applied, **constraints}


def estimate(
    model_or_config: object,
    strategy: Union[str, Plan],
    *,
    cluster: Union[str, "os.PathLike[str]"] = _native.CLUSTER,
    gpus: Optional[int] = None,
    seq_len: Optional[int] = None,
    global_batch: Optional[int] = None,
    lengths: Optional[str] = None,
    packing: Optional[str] = None,
    precision: str = "bf16",
    runtime: Optional[str] = None,
    headroom: float = _native.HEADROOM,
) -> Plan:
    """The plan of one strategy, such as `"tp=8,pp=4,mbs=1"`, with its predicted time and memory.

    What the text leaves out is filled in. For a `Plan`, its strategy is used. Other arguments are
    those of `search`.

    Raises:
        ValueError: unknown keys, with the nearest known one; a strategy that is not legal.
    """
    if getattr(strategy, "groups", None):
        raise PlanError(GROUPS_DIFFER)
    text = getattr(strategy, "strategy_text", strategy)
    if not isinstance(text, str):
        raise PlanError(f"strategy {strategy!r}: expected text such as tp=2,pp=2, or a Plan")
    documents = (lengths, packing)
    given = _given(model_or_config, cluster, gpus, seq_len, global_batch, documents, precision, runtime, headroom)
    return _native.estimate(given, text)


def diagnose(log: Union[str, "os.PathLike[str]"], plan: Plan, *, warmup: Optional[int] = None) -> Answer:
    """Compares a training log with its plan: measured and predicted time and memory, and causes of a gap.

    Args:
        log: a log of Megatron-LM, torchtitan, nanotron, DeepSpeed, NeMo, MaxText, Hugging Face's Trainer or
            `vescale-plan run`, or metrics that Weights & Biases or TensorBoard exported.
        plan: the plan of the run.
        warmup: logged steps to skip; by default a tenth, at least 2.

    Raises:
        ValueError: the log holds no training step.
    """
    return _native.diagnose(log, plan, None if warmup is None else _count("warmup", warmup, 0))


def _given(
    model: object,
    cluster: Union[str, "os.PathLike[str]"],
    gpus: Optional[int],
    seq_len: Optional[int],
    global_batch: Optional[int],
    documents: Tuple[Optional[str], Optional[str]],
    precision: str,
    runtime: Optional[str],
    headroom: float,
) -> _native.Given:
    if gpus is None:
        world = os.environ.get("WORLD_SIZE")
        if world is None:
            raise PlanError("gpus: how many devices? Pass gpus=, or start with torchrun")
        if not world.isdigit():
            raise PlanError(f"gpus: WORLD_SIZE is {world!r}; expected the number of ranks, or gpus=")
        gpus = int(world)
    if isinstance(cluster, os.PathLike):
        cluster = os.fspath(cluster)
    texts = {"cluster": cluster, "runtime": runtime, "precision": precision, "lengths": documents[0], "packing": documents[1]}
    for name, value in texts.items():
        if not isinstance(value, str) and not (value is None and name in ("runtime", "lengths", "packing")):
            raise PlanError(f"{name} {value!r}: expected a text")
    try:
        share = float(operator.truediv(headroom, 1))
    except TypeError:
        raise PlanError(f"headroom {headroom!r}: expected a number such as 0.05") from None
    name, config = _model(model)
    return {
        "model": name,
        "config": config,
        "cluster": cluster,
        "gpus": _count("gpus", gpus),
        "runtime": runtime or DEFAULT_RUNTIME,
        "seq_len": None if seq_len is None else _count("seq_len", seq_len),
        "global_batch": None if global_batch is None else _count("global_batch", global_batch),
        "lengths": documents[0],
        "packing": documents[1],
        "precision": precision,
        "headroom": share,
    }


def _count(name: str, value: object, least: int = 1) -> int:
    """A whole number of any kind, such as NumPy's, as Python's own."""
    try:
        count = operator.index(cast(SupportsIndex, value))
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or not least <= count < 2**63:
        raise PlanError(f"{name} {value!r}: expected a whole number of at least {least}, and below 2**63")
    return count


def _model(model: object) -> Tuple[str, Optional[str]]:
    """Name of a model and, when it is in memory, its configuration as JSON."""
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model), None
    config: object = getattr(model, "config", model)
    if hasattr(config, "to_dict"):
        config = cast(Callable[[], object], getattr(config, "to_dict"))()
    if not isinstance(config, Mapping):
        raise PlanError(f"{type(model).__name__}: expected a model with a config, a config, a preset or a path")
    fields = cast(Mapping[str, object], config)
    text = json.dumps(fields, default=str, sort_keys=True, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{fields.get('model_type', 'model')}-{digest}", text


def _constraints(given: Mapping[str, Constraint]) -> Tuple[List[str], List[str], List[str], List[str]]:
    fix: List[str] = []
    at_least: List[str] = []
    at_most: List[str] = []
    forbid: List[str] = []
    for key, value in given.items():
        words = _words(value)
        if key == "forbid":
            forbid.extend(words)
        elif key.startswith("min_"):
            at_least.append(f"{key[4:]}={'|'.join(words)}")
        elif key.startswith("max_"):
            at_most.append(f"{key[4:]}={'|'.join(words)}")
        else:
            fix.append(f"{key}={'|'.join(words)}")
    return fix, at_least, at_most, forbid


def _words(value: Constraint) -> List[str]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [{True: "on", False: "off"}[v] if isinstance(v, bool) else str(v) for v in values]


def _named(key: str, given: Mapping[str, Constraint]) -> bool:
    return any(k in (key, f"min_{key}", f"max_{key}") for k in given)
