"""Products of decoder layers in 8 bits, by torchao, with tensor-wise scales computed in every step."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .anatomy import Anatomy
from .strategy import PlanError, Strategy

# Sizes of 8-bit products on GPUs must be multiples of this.
MULTIPLE = 16


def check(strategy: Strategy, parts: Anatomy) -> None:
    """Refuses what is not applied."""
    if strategy.precision != "fp8":
        return
    if strategy.tp > 1 or strategy.ep > 1:
        raise PlanError("precision fp8 is applied without tensor and expert parallelism; plan with tp=1, ep=1")
    if not any(_converted(module) for layer in parts.layers for module in layer.modules()):
        raise PlanError(f"precision fp8: the layers of {type(parts.model).__name__} have no nn.Linear that 8 bits take")
    _torchao()


def apply(parts: Anatomy, device: torch.device) -> None:
    """Makes the linear layers of the decoder's layers compute in 8 bits, in place; without a GPU that can, they round to 8
    bits and compute in the type of activations."""
    ao = _torchao()
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    config = ao.Float8LinearConfig(emulate=not able)
    for layer in parts.layers:
        ao.convert_to_float8_training(layer, config=config, module_filter_fn=lambda module, _name: _converted(module))


def _converted(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise PlanError(f"precision fp8 needs torchao: {error}") from None
