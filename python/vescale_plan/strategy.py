"""The decisions of a plan, as `parallelize` needs them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union, cast

AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
CP_KINDS = ("ring", "all_gather", "all_to_all")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
GRAD_DTYPES = (None, "fp32", "fp32/bf16")
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "micro_batch", "num_micro_batches")
SWITCHES = ("reshard_after_forward", "sequence_parallel")
OVERLAPS = ("grad_reduce", "param_gather", "tensor_parallel", "pipeline", "expert_parallel")
# What a whole plan must have, as its schema says (`vescale-plan schema plan`).
OF_PLAN = ("schema_version", "id", "tool_version", "model", "cluster", "runtime", "workload", "strategy", "strategy_text",
           "sharding", "prediction")
OF_STRATEGY = DEGREES + SWITCHES + ("cp_kind", "zero", "recompute", "schedule", "axis_order", "stages", "precision", "overlap")
GROUPS_DIFFER = "the plan has several groups of replicas, each with a strategy of its own; expected one of them: plan.group(1)"


class PlanError(ValueError):
    """A plan that is malformed, or that cannot be applied to the given model or machine."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How one training step is spread over ranks; the `strategy` block of a plan file."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    cp_kind: str = "ring"
    ep: int = 1
    etp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    zero: int = 0
    reshard_after_forward: bool = False
    sequence_parallel: bool = False
    micro_batch: int = 1
    num_micro_batches: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    axis_order: Tuple[str, ...] = AXES
    stages: Tuple[int, ...] = ()
    precision: str = "fp32"
    overlap: Mapping[str, bool] = dataclasses.field(default_factory=lambda: {})
    grad_dtype: Optional[str] = None
    optim_states: Optional[str] = None
    offload: Optional[str] = None
    offload_layers: int = 0
    prefetch: Optional[int] = None
    dispatcher: Optional[str] = None
    graphs: Optional[str] = None
    fp8_recipe: Optional[str] = None

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.dp_shard * self.dp_replicate

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step."""
        return self.micro_batch * self.num_micro_batches * self.dp

    @classmethod
    def read(cls, source: Any) -> "Strategy":
        """The strategy of a `Plan`, of a plan file (YAML or JSON), or of a mapping.

        A plan file must be whole. A mapping may be a `strategy` block that leaves out what has its default.

        Raises `PlanError` naming the field that is unknown, missing or out of range.
        """
        if isinstance(source, Strategy):
            return source
        name = "plan"
        if isinstance(source, (str, os.PathLike)):
            path = pathlib.Path(cast("Union[str, os.PathLike[str]]", source))
            name = str(path)
            source = _opened(path)
        if not isinstance(source, Mapping):
            if getattr(source, "groups", None):
                raise PlanError(GROUPS_DIFFER)
            block = getattr(source, "strategy", None)
            source = block() if callable(block) else block
        if not isinstance(source, Mapping):
            raise PlanError(f"{name}: expected a plan, a path to one, or its `strategy` mapping")
        fields = cast("Mapping[str, object]", source)
        if fields.get("groups"):
            raise PlanError(f"{name}: {GROUPS_DIFFER}")
        inner = fields.get("strategy", fields)
        if not isinstance(inner, Mapping):
            raise PlanError(f"{name}: `strategy` is not a mapping")
        values: Dict[str, Any] = dict(cast("Mapping[str, object]", inner))
        if "strategy" in fields:
            _must_have(fields, OF_PLAN, f"{name}: ")
            _must_have(values, OF_STRATEGY, f"{name}: strategy.")
            if fields["schema_version"] != 1:
                raise PlanError(f"{name}: schema_version is {fields['schema_version']!r}; expected 1")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known, key=str)
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), sorted(known), n=1, cutoff=0)
            raise PlanError(f"{name}: strategy.{unknown[0]}: unknown field; did you mean {near[0]}?")
        order: Any = values.get("axis_order", AXES)
        values["axis_order"] = tuple(order.split("-")) if isinstance(order, str) else _tuple(order)
        values["stages"] = _tuple(values.get("stages", ()))
        strategy = cls(**values)
        strategy._check(name)
        return strategy

    def _check(self, name: str) -> None:
        def wrong(field: str, expected: str) -> PlanError:
            return PlanError(f"{name}: strategy.{field} is {getattr(self, field)!r}; expected {expected}")

        for field in DEGREES:
            if not _whole(getattr(self, field), 1):
                raise wrong(field, "a whole number of at least 1")
        for field in SWITCHES:
            if not isinstance(getattr(self, field), bool):
                raise wrong(field, "true or false")
        overlap: Any = self.overlap
        if not isinstance(overlap, Mapping) or not all(
            key in OVERLAPS and isinstance(value, bool) for key, value in cast("Mapping[Any, object]", overlap).items()
        ):
            raise wrong("overlap", "true or false for each of " + ", ".join(OVERLAPS))
        if not _whole(self.zero, 0) or self.zero > 3:
            raise wrong("zero", "0, 1, 2 or 3")
        recompute: Any = self.recompute
        if not isinstance(recompute, str):
            raise wrong("recompute", "a text such as none, selective or full")
        if self.schedule not in SCHEDULES:
            raise wrong("schedule", "one of " + ", ".join(SCHEDULES))
        if self.cp_kind not in CP_KINDS:
            raise wrong("cp_kind", "one of " + ", ".join(CP_KINDS))
        if self.precision not in PRECISIONS:
            raise wrong("precision", "one of " + ", ".join(PRECISIONS))
        if self.grad_dtype not in GRAD_DTYPES:
            raise wrong("grad_dtype", "fp32 or fp32/bf16: FSDP2 holds gradients in the parameters' type")
        if self.optim_states is not None:
            raise wrong("optim_states", "none: `parallelize` leaves optimizer states to the optimizer that it is given")
        if not _whole(self.offload_layers, 0) or self.offload_layers > 0:
            raise wrong("offload_layers", "0: `parallelize` keeps activations on the device")
        ahead: Any = self.prefetch
        if ahead is not None and (not _whole(ahead, 1) or ahead > 8):
            raise wrong("prefetch", "1 to 8 blocks: FSDP2 always gathers the next one ahead")
        if ahead is not None and not (self.zero == 3 and self.reshard_after_forward):
            raise wrong("prefetch", "none: only parameters that every pass gathers (zero 3, reshard_after_forward) are gathered ahead")
        if self.dispatcher is not None:
            raise wrong("dispatcher", "none: `parallelize` has a single way to send tokens to experts")
        if self.graphs is not None:
            raise wrong("graphs", "none: `parallelize` captures no CUDA graphs")
        if self.fp8_recipe not in (None, "tensorwise"):
            raise wrong("fp8_recipe", "tensorwise: `parallelize` gives each tensor a scale of its own")
        if self.offload is not None:
            raise wrong("offload", "none: `parallelize` keeps states on the device")
        order: Any = self.axis_order
        if not isinstance(order, tuple) or sorted(map(str, cast("Tuple[object, ...]", order))) != sorted(AXES):
            raise wrong("axis_order", "each once of " + ", ".join(AXES))
        stages: Any = self.stages
        if not isinstance(stages, tuple) or not all(_whole(count, 0) for count in cast("Tuple[object, ...]", stages)):
            raise wrong("stages", "a list of layers per virtual stage")
        if self.stages and len(self.stages) != self.pp * self.vpp:
            raise wrong("stages", f"{self.pp * self.vpp} entries (pp * vpp)")


def _whole(value: object, least: int) -> bool:
    """Whether a value is a whole number of at least `least`; `True` and `1.0` are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _tuple(value: Any) -> Any:
    """A list as a tuple; anything else as it is, for the check to refuse."""
    return tuple(value) if isinstance(value, list) else value


def _must_have(given: Mapping[str, object], names: Tuple[str, ...], prefix: str) -> None:
    """Refuses a mapping without one of these fields."""
    missing = [name for name in names if name not in given]
    if missing:
        raise PlanError(f"{prefix}{missing[0]} is missing; expected a whole plan file, as `vescale-plan` writes them")


def _opened(path: pathlib.Path) -> Any:
    """A plan file: read as every command reads it where the planner is there, which also compares its id with its decisions;
    otherwise its mapping."""
    try:
        from ._native import Plan
    except ImportError:
        return _parse(path)
    try:
        return Plan.from_file(path)
    except ValueError as error:
        raise PlanError(str(error)) from None


def _parse(path: pathlib.Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    # A plan in JSON needs no parser of YAML. What a file is called does not say what it holds.
    try:
        fields = json.loads(text)
    except json.JSONDecodeError:
        fields = _yaml(text, path)
    if not isinstance(fields, Mapping) or "strategy" not in fields:
        raise PlanError(f"{path}: strategy is missing; expected a whole plan file, as `vescale-plan` writes them")
    return cast("Mapping[str, object]", fields)


def _yaml(text: str, path: pathlib.Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{path}: {' '.join(str(error).split())}") from None


PlanLike = Union[Strategy, Mapping[str, Any], str, "os.PathLike[str]", Any]
