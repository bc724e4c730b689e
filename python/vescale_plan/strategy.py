"""The decisions of a plan, as `parallelize` needs them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
from typing import Any, Dict, Mapping, Optional, Tuple, Union, cast

AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
CP_KINDS = ("ring", "all_gather", "all_to_all")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
GRAD_DTYPES = (None, "fp32", "fp32/bf16")
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

        Raises `PlanError` naming the field that is unknown, missing or out of range.
        """
        if isinstance(source, Strategy):
            return source
        name = "plan"
        if isinstance(source, (str, os.PathLike)):
            path = pathlib.Path(cast("Union[str, os.PathLike[str]]", source))
            name = str(path)
            source = _parse(path)
        elif not isinstance(source, Mapping):
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
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            near = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0)
            raise PlanError(f"{name}: strategy.{unknown[0]}: unknown field; did you mean {near[0]}?")
        order: Any = values.get("axis_order", AXES)
        values["axis_order"] = tuple(order.split("-")) if isinstance(order, str) else tuple(order)
        values["stages"] = tuple(values.get("stages", ()))
        strategy = cls(**values)
        strategy._check(name)
        return strategy

    def _check(self, name: str) -> None:
        def wrong(field: str, expected: str) -> PlanError:
            return PlanError(f"{name}: strategy.{field} is {getattr(self, field)!r}; expected {expected}")

        degrees = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_shard", "dp_replicate")
        for field in degrees + ("micro_batch", "num_micro_batches"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise wrong(field, "a whole number of at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise wrong("zero", "0, 1, 2 or 3")
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
        if self.offload_layers != 0:
            raise wrong("offload_layers", "0: `parallelize` keeps activations on the device")
        ahead: Any = self.prefetch
        if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or not 1 <= ahead <= 8):
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
        if sorted(self.axis_order) != sorted(AXES):
            raise wrong("axis_order", "each once of " + ", ".join(AXES))
        stages: Tuple[Any, ...] = self.stages
        for count in stages:
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise wrong("stages", "layers per virtual stage")
        if self.stages and len(self.stages) != self.pp * self.vpp:
            raise wrong("stages", f"{self.pp * self.vpp} entries (pp * vpp)")


def _parse(path: pathlib.Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}:{error.lineno}: {error.msg}") from None
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{path}: {' '.join(str(error).split())}") from None


PlanLike = Union[Strategy, Mapping[str, Any], str, "os.PathLike[str]", Any]
