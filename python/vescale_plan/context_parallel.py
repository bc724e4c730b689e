"""Context parallelism: each rank computes a part of every sequence."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Iterator

import torch

from .batch import Share
from .groups import Place
from .strategy import PlanError


class ContextParallel:
    """Shards sequences and lets attention see the whole of them."""

    def __init__(self, place: Place):
        raise PlanError(f"cp={place.strategy.cp}: not applied")
