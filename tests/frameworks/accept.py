"""Gives an exported configuration to the framework's own parser, and compares what it read with the
plan. Usage: accept.py DIALECT FOLDER STRATEGY_JSON; exit code 1 and a message when it is refused."""

import json
import pathlib
import sys

import absent  # noqa: F401


def same(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: the framework reads {found!r}, the plan says {expected!r}")


def titan_mesh(parallel, world, extra):
    from torchtitan.distributed import ParallelDims

    ParallelDims(
        dp_replicate=parallel.data_parallel_replicate_degree,
        dp_shard=parallel.data_parallel_shard_degree,
        cp=parallel.context_parallel_degree,
        tp=parallel.tensor_parallel_degree,
        pp=parallel.pipeline_parallel_degree,
        ep=parallel.expert_parallel_degree,
        world_size=world,
        **extra,
    )


def titan_parallelism(parallel, plan):
    same("tp", parallel.tensor_parallel_degree, plan["tp"])
    same("pp", parallel.pipeline_parallel_degree, plan["pp"])
    same("cp", parallel.context_parallel_degree, plan["cp"])
    same("dp_shard", parallel.data_parallel_shard_degree, plan["dp_shard"])
    same("dp_replicate", parallel.data_parallel_replicate_degree, plan["dp_replicate"])
    if plan["pp"] > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(parallel.pipeline_parallel_schedule)
        stages = [sum(name.startswith("layers.") for name in part) for part in parallel.module_fqns_per_model_part]
        same("stages", stages, plan["stages"])


def torchtitan_02(folder, plan):
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(["--job.config_file", str(folder / "train.toml")])
    titan_parallelism(config.parallelism, plan)
    titan_mesh(config.parallelism, plan["gpus"], {"etp": config.parallelism.expert_tensor_parallel_degree})
    same("seq_len", config.training.seq_len, plan["seq_len"])
    same("global batch", config.training.global_batch_size, plan["global_batch"])
    same("recompute", config.activation_checkpoint.mode != "none", plan["recompute"] != "none")


def titan_model(config, plan):
    """The model, made without storage, has as many parameters as the plan's."""
    import torch

    with torch.device("meta"):
        model = config.model_spec.model.build()
    same("parameters", sum(p.numel() for p in model.parameters()), plan["parameters"])


def torchtitan_03(folder, plan):
    sys.path.insert(0, str(folder))
    import vescale_plan_config

    config = vescale_plan_config.plan()
    # Its own checks run when it is made; what was set since is checked by running them again.
    config.__post_init__()
    for section in (config.parallelism, config.compile):
        section.__post_init__()
    titan_parallelism(config.parallelism, plan)
    titan_mesh(config.parallelism, plan["gpus"], {"spmd_backend": config.parallelism.spmd_backend})
    titan_model(config, plan)
    same("seq_len", config.training.seq_len, plan["seq_len"])
    same("global batch", config.training.global_batch_size, plan["global_batch"])
    same("recompute", config.activation_checkpoint is not None, plan["recompute"] != "none")


def deepspeed(folder, plan):
    from deepspeed.runtime import config as module

    # It asks the running job for the number of ranks; there is none, so the plan's stand in.
    module.dist.get_rank = lambda: 0

    class Ranks:
        @staticmethod
        def get_data_parallel_world_size():
            return plan["dp_shard"] * plan["dp_replicate"]

    config = module.DeepSpeedConfig(str(folder / "ds_config.json"), mpu=Ranks)
    same("global batch", config.train_batch_size, plan["global_batch"])
    same("micro-batch", config.train_micro_batch_size_per_gpu, plan["micro_batch"])
    same("ZeRO", config.zero_config.stage, plan["zero"])
    same("tp", config.tensor_parallel_config.autotp_size or 1, plan["tp"])


def accelerate(folder, plan):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(folder / "accelerate.yaml"))
    same("processes", config.num_processes, plan["gpus"])
    if plan["zero"] == 3:
        sizes = config.parallelism_config
        same("dp_shard", sizes["parallelism_config_dp_shard_size"], plan["dp_shard"])
        same("cp", sizes["parallelism_config_cp_size"], plan["cp"])
        same("FSDP", config.fsdp_config["fsdp_version"], 2)


def axolotl(folder, plan):
    import yaml
    from axolotl.utils.schemas.config import AxolotlInputConfig

    text = yaml.safe_load((folder / "axolotl.yaml").read_text())
    # A plan says nothing about data and learning rate, which axolotl asks for.
    own = {"datasets": [{"path": "x", "type": "alpaca"}], "learning_rate": 1e-4, "output_dir": "out"}
    config = AxolotlInputConfig(**{**text, **own})
    same("sequence", config.sequence_len, plan["seq_len"])
    same("micro-batch", config.micro_batch_size, plan["micro_batch"])
    if plan["zero"] == 3:
        same("dp_shard", config.dp_shard_size, plan["dp_shard"])


DIALECTS = {
    "torchtitan@0.2": torchtitan_02,
    "torchtitan@0.3": torchtitan_03,
    "deepspeed@0.19": deepspeed,
    "accelerate@1.15": accelerate,
    "axolotl@0.19": axolotl,
}


def main():
    dialect, folder, plan = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(pathlib.Path(sys.argv[3]).read_text())
    sys.argv = sys.argv[:1]
    DIALECTS[dialect](folder, plan)


if __name__ == "__main__":
    main()
