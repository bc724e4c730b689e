"""Ranks: the device mesh of a plan and this process's place in it."""

from __future__ import annotations

import dataclasses
import os
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .strategy import PlanError, Strategy


@dataclasses.dataclass
class Place:
    """The mesh of the job, and where this rank is in it."""

    mesh: DeviceMesh
    device: torch.device
    strategy: Strategy

    def rank(self, axis: str) -> int:
        """This process's coordinate along an axis."""
        return self.mesh.get_local_rank(axis)

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank takes."""
        return self.rank("dp_replicate") * self.strategy.dp_shard + self.rank("dp_shard")

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one only along an axis."""
        return self.mesh.get_group(axis)


def start(strategy: Strategy, device: Optional[str]) -> Place:
    """Joins the job that torchrun started and lays out its ranks as the plan says."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29511")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    if world != strategy.world:
        raise PlanError(
            f"the plan is for {strategy.world} ranks (tp {strategy.tp} x cp {strategy.cp} x dp {strategy.dp} x "
            f"pp {strategy.pp}), and this job has {world}; start it with torchrun over {strategy.world}"
        )
    axes = [(name, int(getattr(strategy, name))) for name in reversed(strategy.axis_order)]
    if strategy.ep > 1:
        # Neighbours along dp_shard hold different experts.
        at = [name for name, _ in axes].index("dp_shard")
        axes[at : at + 1] = [("edp", strategy.dp_shard // strategy.ep), ("ep", strategy.ep)]
    mesh = init_device_mesh(device, tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
    if strategy.ep > 1:
        mesh["edp", "ep"]._flatten("dp_shard")
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    return Place(mesh=mesh, device=here, strategy=strategy)
