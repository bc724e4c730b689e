"""Gives an exported configuration to the framework's own parser, and compares what it read with the
plan. Usage: accept.py DIALECT FOLDER STRATEGY_JSON; exit code 1 and a message when it is refused. Or accept.py --many
TARGET, with folders of the grid (`out`, `plan.json`, what the launch script started) on stdin: a line of JSON for each."""

import importlib
import json
import os
import pathlib
import sys

import absent  # noqa: F401
from apart import apart


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
    """The model, made without storage, has as many parameters as the plan's, which counts no layers for later tokens."""
    import torch

    with torch.device("meta"):
        model = config.model_spec.model.build()
    count = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("mtp_"))
    for layer in model.layers.values():
        # The bias of DeepSeek-V3's router is no parameter in torchtitan, but a buffer; other routers have none by our count.
        moe = getattr(layer, "moe", None)
        if moe is not None and moe.router.score_func == "sigmoid":
            count += moe.expert_bias_E.numel()
    same("parameters", count, plan["parameters"])


def titan_python(folder, plan):
    """The configuration, after the checks that run when it is made and those of its trainer before the model is built."""
    sys.path.insert(0, str(folder))
    import vescale_plan_config

    config = vescale_plan_config.plan()
    # Its own checks run when it is made; what was set since is checked by running them again.
    config.__post_init__()
    for section in (config.training, config.parallelism, config.compile):
        if hasattr(section, "__post_init__"):
            section.__post_init__()
    titan_parallelism(config.parallelism, plan)
    titan_mesh(config.parallelism, plan["gpus"], {"spmd_backend": config.parallelism.spmd_backend})
    # As its trainer does.
    config.model_spec.model.update_from_config(config=config)
    config._validate_cuda_graphs()
    titan_model(config, plan)
    same("recompute", config.activation_checkpoint is not None, plan["recompute"] != "none")
    same("graphs", not config.training.disable_cuda_graphs, plan.get("graphs") == "step")
    return config


def torchtitan_03(folder, plan):
    config = titan_python(folder, plan)
    same("seq_len", config.training.seq_len, plan["seq_len"])
    same("global batch", config.training.global_batch_size, plan["global_batch"])


def torchtitan_main(folder, plan):
    config = titan_python(folder, plan)
    same("seq_len", config.training.max_context_length, plan["seq_len"])
    same("tokens of a step", config.training.num_tokens_per_train_step, plan["global_batch"] * plan["seq_len"])


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
    zero, offload = config.zero_config, plan.get("offload")
    same("optimizer in host memory", getattr(zero.offload_optimizer, "device", "none"), "cpu" if offload else "none")
    same("parameters in host memory", getattr(zero.offload_param, "device", "none"), "cpu" if offload == "parameters" else "none")
    if "grad_dtype" in plan:
        same("gradients", (config.grad_accum_dtype, str(config.communication_data_type)), ("fp32", "torch.float32"))


def accelerate(folder, plan):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(folder / "accelerate.yaml"))
    same("processes", config.num_processes, plan["gpus"])
    if plan["zero"] == 3:
        sizes = config.parallelism_config
        same("dp_shard", sizes["parallelism_config_dp_shard_size"], plan["dp_shard"])
        same("cp", sizes["parallelism_config_cp_size"], plan["cp"])
        same("FSDP", config.fsdp_config["fsdp_version"], 2)
        same("parameters in host memory", config.fsdp_config.get("fsdp_offload_params", False), "offload" in plan)


def axolotl(folder, plan):
    import yaml
    from axolotl.utils.schemas.config import AxolotlInputConfig

    text = yaml.safe_load((folder / "axolotl.yaml").read_text())
    own = {"datasets": [{"path": "x", "type": "alpaca"}], "output_dir": "out"}
    config = AxolotlInputConfig(**{**text, **own})
    same("sequence", config.sequence_len, plan["seq_len"])
    same("micro-batch", config.micro_batch_size, plan["micro_batch"])
    if plan["zero"] == 3:
        same("dp_shard", config.dp_shard_size, plan["dp_shard"])
        same("parameters in host memory", bool(config.fsdp_config.offload_params), "offload" in plan)


def recorded(folder):
    """The words that the launch script gave its launcher, and the environment it had."""
    words = (folder.parent / "argv").read_text().split("\0")[:-1]
    pairs = (folder.parent / "env").read_text().split("\0")
    return words, dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def core_choices(plan, of_model, of_optimizer, reduced_in_fp32):
    """What Megatron-Core does beside the parallel sizes, held by the parts of its configuration."""
    same("tensor parallelism overlapped", bool(of_model.tp_comm_overlap), plan["overlap"]["tensor_parallel"])
    same("experts' messages overlapped", bool(of_model.overlap_moe_expert_parallel_comm), plan["overlap"].get("expert_parallel", False))
    if plan["ep"] > 1:
        dispatcher = plan.get("dispatcher", "all_to_all")
        kind = {"all_to_all": "alltoall", "all_gather": "allgather"}.get(dispatcher, "flex")
        same("dispatcher", of_model.moe_token_dispatcher_type, kind)
        if kind == "flex":
            same("dispatcher's kernels", of_model.moe_flex_dispatcher_backend, dispatcher)
    graphs = {None: "none", "none": "none", "layers": "transformer_engine", "step": "full_iteration"}[plan.get("graphs")]
    same("graphs", of_model.cuda_graph_impl, graphs)
    if graphs == "transformer_engine":
        same("attention captured", any(getattr(module, "name", module) == "attn" for module in of_model.cuda_graph_modules), True)
    same("layers' activations in host memory", of_model.cpu_offloading_num_layers, plan.get("offload_layers", 0))
    offload = plan.get("offload")
    same("states in host memory", bool(of_optimizer.optimizer_cpu_offload), offload is not None)
    if offload is not None:
        same("share in host memory", of_optimizer.optimizer_offload_fraction, int(offload.partition(":")[2] or 100) / 100)
    eight_bits = plan["precision"] == "fp8"
    same("8-bit products", of_model.fp8 is not None, eight_bits)
    if eight_bits:
        same("recipe", getattr(of_model.fp8_recipe, "value", of_model.fp8_recipe), plan.get("fp8_recipe", "delayed"))
    same("gradients reduced in 32 bits", bool(reduced_in_fp32), plan.get("grad_dtype") != "bf16")
    if plan.get("optim_states") == "bf16_moments":
        same("moments", [str(of_optimizer.exp_avg_dtype), str(of_optimizer.exp_avg_sq_dtype)], ["torch.bfloat16"] * 2)


def megatron(folder, plan):
    import unittest.mock

    import torch
    from megatron.training import arguments

    words, environment = recorded(folder)
    at = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(plan["gpus"])})
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if "CUDA_DEVICE_MAX_CONNECTIONS" in environment:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    # It asks the GPU for its architecture; Hopper stands in.
    torch.cuda.get_device_properties = lambda *_: unittest.mock.MagicMock(major=9, minor=0)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    own = ["--lr", "1e-4", "--min-lr", "1e-5", "--train-iters", "10", "--lr-decay-iters", "10"]
    sys.argv = ["pretrain_gpt.py", *words[at + 1 :], *own]
    args = arguments.parse_args()
    arguments.validate_args(args)
    same("tp", args.tensor_model_parallel_size, plan["tp"])
    same("pp", args.pipeline_model_parallel_size, plan["pp"])
    same("cp", args.context_parallel_size, plan["cp"])
    same("ep", args.expert_model_parallel_size, plan["ep"])
    same("data-parallel ranks", args.data_parallel_size, plan["dp_shard"] * plan["dp_replicate"])
    same("micro-batch", args.micro_batch_size, plan["micro_batch"])
    same("global batch", args.global_batch_size, plan["global_batch"])
    same("seq_len", args.seq_length, plan["seq_len"])
    same("sequence parallelism", bool(args.sequence_parallel), plan["sequence_parallel"])
    same("states sharded", bool(args.use_distributed_optimizer), plan["zero"] > 0)
    same("Megatron-FSDP", bool(args.use_megatron_fsdp), plan["zero"] > 1)
    same("recomputation", args.recompute_granularity is not None, plan["recompute"] != "none")
    same("layers", args.num_layers, sum(plan["stages"]))
    # The checks of Megatron-Core itself, as its training script makes its configuration.
    model = arguments.core_transformer_config_from_args(args)
    core_choices(plan, model, args, args.accumulate_allreduce_grads_in_fp32)


def megatron_bridge(folder, plan):
    """The script that the launcher would start, run up to where ranks would start; then Bridge's own values."""
    import bridge

    hub = folder.parent / "hub"
    if plan["hub"]:
        bridge.hub_config(hub, plan["model"])
    words, environment = recorded(folder)
    at = next(i for i, word in enumerate(words) if word.endswith("vescale_plan_bridge.py"))
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if "CUDA_DEVICE_MAX_CONNECTIONS" in environment:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    bridge.as_on_gpus(plan["gpus"])
    config = bridge.started(words[at], words[at + 1 :])
    model = config.model
    same("tp", model.tensor_model_parallel_size, plan["tp"])
    same("pp", model.pipeline_model_parallel_size, plan["pp"])
    same("vpp", model.virtual_pipeline_model_parallel_size or 1, plan["vpp"])
    same("cp", model.context_parallel_size, plan["cp"])
    same("ep", model.expert_model_parallel_size, plan["ep"])
    if plan["ep"] > 1:
        same("etp", model.expert_tensor_parallel_size, plan["etp"])
    same("data-parallel ranks", config.data_parallel_size, plan["dp_shard"] * plan["dp_replicate"])
    same("micro-batch", config.train.micro_batch_size, plan["micro_batch"])
    same("global batch", config.train.global_batch_size, plan["global_batch"])
    same("seq_len", (model.seq_length, config.dataset.seq_length), (plan["seq_len"], plan["seq_len"]))
    same("sequence parallelism", bool(model.sequence_parallel), plan["sequence_parallel"])
    same("states sharded", (config.ddp.use_distributed_optimizer, config.optimizer.use_distributed_optimizer), (plan["zero"] > 0,) * 2)
    same("Megatron-FSDP", bool(config.ddp.use_megatron_fsdp), plan["zero"] > 1)
    if plan["zero"] > 1:
        strategy = {2: "optim_grads", 3: "optim_grads_params"}[plan["zero"]]
        same("shards", config.ddp.data_parallel_sharding_strategy, strategy)
    same("recomputation", model.recompute_granularity, {"none": None, "full": "full"}.get(plan["recompute"], "selective"))
    same("bf16", (model.bf16, config.optimizer.bf16), (True, True))
    same("gathered in 8 bits", bool(config.ddp.fp8_param_gather), False)
    same("stages", bridge.stages(model), plan["stages"])
    core_choices(plan, model, config.optimizer, config.ddp.grad_reduce_in_fp32)
    if different := bridge.differences(model, bridge.own_model(hub) if plan["hub"] else None, plan):
        sys.exit("; ".join(different))


def nanotron(folder, plan):
    from nanotron.config import get_config_from_file

    config = get_config_from_file(str(folder / "nanotron.yaml"))
    axes = config.parallelism
    same("tp", axes.tp, plan["tp"])
    same("pp", axes.pp, plan["pp"])
    same("cp", axes.context_parallel_size, plan["cp"])
    same("dp", axes.dp, plan["dp_shard"] * plan["dp_replicate"])
    same("recomputation", axes.recompute_layer, plan["recompute"] == "full")
    same("ZeRO", config.optimizer.zero_stage, plan["zero"])
    same("micro-batch", config.tokens.micro_batch_size, plan["micro_batch"])
    same("seq_len", config.tokens.sequence_length, plan["seq_len"])
    same("layers", config.model.model_config.num_hidden_layers, sum(plan["stages"]))


def trainer(folder, plan):
    from transformers import HfArgumentParser, TrainingArguments, training_args

    # It asks the GPU whether it has bf16.
    training_args.is_torch_bf16_gpu_available = lambda: True
    text = json.loads((folder / "training_args.json").read_text())
    own = {"model_name_or_path", "dtype", "tokenizer_name", "dataset_name", "block_size"}
    same("block_size", text["block_size"], plan["seq_len"])
    given = {key: value for key, value in text.items() if key not in own}
    given |= {"use_cpu": False, "output_dir": "/tmp/frameworks-trainer", "report_to": "none"}
    (args,) = HfArgumentParser(TrainingArguments).parse_dict(given)
    same("micro-batch", args.per_device_train_batch_size, plan["micro_batch"])
    same("micro-batches", args.gradient_accumulation_steps, plan["num_micro_batches"])
    same("bf16", args.bf16, True)
    same("moments in 8 bits", "8bit" in args.optim, plan.get("optim_states") == "8bit_moments")
    if args.deepspeed:
        same("ZeRO", args.hf_deepspeed_config.config["zero_optimization"]["stage"], plan["zero"])
        same("recomputation", args.gradient_checkpointing, plan["recompute"] == "full")
    else:
        same("FSDP", bool(args.fsdp), plan["zero"] > 1)
        if args.fsdp:
            plugin = args.fsdp_plugin_args
            same("FSDP version", plugin["fsdp_version"], 2)
            same("freed after forward", plugin["reshard_after_forward"], plan["reshard_after_forward"])
            same("recomputation", plugin["activation_checkpointing"], plan["recompute"] == "full")


def llama_factory(folder, plan):
    from llamafactory.hparams import parser
    from transformers import TrainingArguments, training_args
    from transformers.training_args import ParallelMode

    # It asks the GPU whether it has bf16, and the running job for its ranks; there is none, so the plan's stand in.
    training_args.is_torch_bf16_gpu_available = lambda: True
    TrainingArguments.parallel_mode = ParallelMode.DISTRIBUTED
    TrainingArguments.world_size = plan["gpus"]
    parser.get_current_device = lambda: "cpu"
    sys.argv = ["launcher.py", str(folder / "llamafactory.yaml"), "output_dir=/tmp/frameworks-llama-factory", "report_to=none"]
    model, data, args, tuning, _ = parser.get_train_args()
    same("sequence", data.cutoff_len, plan["seq_len"])
    same("micro-batch", args.per_device_train_batch_size, plan["micro_batch"])
    same("micro-batches", args.gradient_accumulation_steps, plan["num_micro_batches"])
    same("ZeRO", args.hf_deepspeed_config.config["zero_optimization"]["stage"], plan["zero"])
    same("recomputation", not model.disable_gradient_checkpointing, plan["recompute"] == "full")
    same("tuning", tuning.finetuning_type, "full")


DIALECTS = {
    "torchtitan@0.2": torchtitan_02,
    "torchtitan@0.3": torchtitan_03,
    "torchtitan@main": torchtitan_main,
    "deepspeed@0.19": deepspeed,
    "accelerate@1.15": accelerate,
    "axolotl@0.19": axolotl,
    "megatron-lm": megatron,
    "megatron-bridge": megatron_bridge,
    "nanotron": nanotron,
    "transformers": trainer,
    "transformers-deepspeed": trainer,
    "llama-factory": llama_factory,
}

# What is imported once, before a process is made for each plan.
WARM = {
    "torchtitan@0.2": ["torchtitan.config", "torchtitan.distributed"],
    "torchtitan@0.3": ["torchtitan.trainer", "torchtitan.distributed"],
    "torchtitan@main": ["torchtitan.trainer", "torchtitan.distributed"],
    "deepspeed@0.19": ["deepspeed.runtime.config"],
    "accelerate@1.15": ["accelerate.commands.config.config_args"],
    "axolotl@0.19": ["axolotl.utils.schemas.config"],
    "megatron-lm": ["megatron.training.arguments"],
    "megatron-bridge": ["megatron.bridge.recipes.common", "megatron.bridge.training.pretrain", "megatron.bridge.training.gpt_step"],
    "nanotron": ["nanotron.config"],
    "transformers": ["transformers.training_args"],
    "transformers-deepspeed": ["transformers.training_args", "deepspeed"],
    "llama-factory": ["llamafactory.hparams.parser", "deepspeed"],
}


def many(target):
    """Judges every folder on stdin in a process of its own, and prints what it says."""
    # LLaMA-Factory's commit asks for an older transformers than the other targets.
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    for module in WARM[target]:
        importlib.import_module(module)
    for line in sys.stdin.read().split("\n"):
        folder = pathlib.Path(line)
        plan = json.loads((folder / "plan.json").read_text())
        error = apart(lambda: DIALECTS[target](folder / "out", plan))
        print(json.dumps({"folder": line, "error": error}), flush=True)


def main():
    if sys.argv[1] == "--many":
        many(sys.argv[2])
        return
    dialect, folder, plan = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(pathlib.Path(sys.argv[3]).read_text())
    sys.argv = sys.argv[:1]
    DIALECTS[dialect](folder, plan)


if __name__ == "__main__":
    main()
