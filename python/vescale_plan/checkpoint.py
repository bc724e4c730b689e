"""Saving and loading through `torch.distributed.checkpoint`: a checkpoint of one plan loads under another."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple, Union

from .strategy import PlanError

if TYPE_CHECKING:
    from ._native import Plan

PLAN_FILE = "plan.yaml"
PATH = Union[str, "os.PathLike[str]"]
KNOWN = ("plan", "model", "optimizer")


def save(path: PATH, state: Mapping[str, Any]) -> None:
    """Saves `{"plan": …, "model": …, "optimizer": …}` (each optional) into the folder `path`.

    Every rank calls it; each writes its own shards. Names are those of the original model, whatever
    the plan, except that GPT-2's fused `c_attn` is saved as `c_attn.q`, `.k` and `.v`.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    _check(state)
    tensors = _tensors(state, [])
    if tensors:
        dcp.state_dict_saver.save(tensors, checkpoint_id=os.fspath(path))
    plan = state.get("plan")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if plan is not None and first:
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
        _as_plan(plan).save(pathlib.Path(path) / PLAN_FILE)
    if dist.is_initialized():
        dist.barrier()


def load(path: PATH, state: Optional[Mapping[str, Any]] = None) -> Optional[Plan]:
    """Reads what `save` wrote; the layout may differ from the one it was saved under.

    With `{"model": …, "optimizer": …}` it fills the model and the optimizer, which `parallelize`
    has made under any plan. Without, `path` may also be a plan file. Returns the plan, if there is
    one.
    """
    folder = pathlib.Path(path)
    if state is not None:
        import torch.distributed.checkpoint as dcp

        _check(state)
        if not folder.is_dir():
            raise PlanError(f"{folder}: no such checkpoint")
        copies: List[Tuple[Any, Any]] = []
        tensors = _tensors(state, copies)
        if tensors:
            dcp.state_dict_loader.load(tensors, checkpoint_id=os.fspath(path))
            for source, copy in copies:
                copy.copy_(source)
            _restore(state, tensors)
    # The planner is needed by those who read or write a plan only.
    file = folder / PLAN_FILE if folder.is_dir() else folder
    if state is not None and not file.exists():
        return None
    return _as_plan(file)


def _check(state: Mapping[str, Any]) -> None:
    unknown = sorted(set(state) - set(KNOWN))
    if unknown:
        raise PlanError(f"state {unknown[0]!r}: expected {', '.join(KNOWN)}")
    if "optimizer" in state and "model" not in state:
        raise PlanError("an optimizer is saved and loaded with its model, whose names it uses")


def _as_plan(plan: Any) -> Plan:
    from ._native import Plan

    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, os.PathLike)):
        return Plan.from_file(plan)
    raise PlanError(f"plan: expected a Plan or the path of one, got {type(plan).__name__}")


def _names(model: Any) -> Dict[Any, str]:
    """Each parameter of this rank with its name in the original model."""
    from .model import ParallelModel

    if not isinstance(model, ParallelModel):
        raise PlanError(f"model: expected what parallelize returned, got {type(model).__name__}")
    return {parameter: name for name, parameter in model.original_parameters()}


def _tensors(state: Mapping[str, Any], copies: List[Tuple[Any, Any]]) -> Dict[str, Any]:
    """What is stored, by name. An optimizer that has not stepped yet gets its state first.

    A tied weight whose two copies are both here is stored once; the other copy goes to `copies`.
    """
    import torch

    model = state.get("model")
    if model is None:
        return {}
    names = _names(model)
    found: Dict[str, Any] = {}

    def add(key: str, tensor: Any) -> None:
        if key in found:
            copies.append((found[key], tensor))
        else:
            found[key] = tensor

    for parameter, name in names.items():
        add(f"model.{name}", parameter.detach())
    optimizer = state.get("optimizer")
    if optimizer is None:
        return found
    _initialise(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                stored = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                add(f"optimizer.{key}.{names[parameter]}", stored)
    return found


def _initialise(optimizer: Any) -> None:
    """Makes the state that an optimizer has before its first step. Weights and gradients stay as they are."""
    import torch

    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p, p.grad, p.detach().clone()) for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        for p, grad, value in kept:
            p.copy_(value)
            p.grad = grad
            made = optimizer.state[p]
            if "step" in made:
                made["step"] = made["step"] * 0


def _restore(state: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Puts back what is not filled in place: state that optimizers keep as plain numbers."""
    import torch

    optimizer = state.get("optimizer")
    if optimizer is None:
        return
    names = _names(state["model"])
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            if not isinstance(value, torch.Tensor):
                kept[key] = type(value)(tensors[f"optimizer.{key}.{names[parameter]}"].item())
