"""Gives the files of `expected.csv` to the frameworks' own parsers, as their launchers would, and prints what these say.

Usage: judge.py SOURCES FRAMEWORK [REPOSITORY], with the framework's modules on PYTHONPATH; a line of CSV for each file: repository,
file, verdict, reason. A verdict is `accepted` (the parser reads the file, and the sizes that it shows are those counted
by hand), `refused` (it ends with an error), or `not judged` (the parser itself cannot be imported here, or asks the hub).
"""

import csv
import functools
import importlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from accept import titan_mesh  # noqa: E402
from apart import apart  # noqa: E402

# Programs that a script starts or asks: these stand-ins record what they are given.
PROGRAMS = ("torchrun", "python", "python3", "sbatch", "srun", "nsys", "pip", "uv", "nvidia-smi", "docker")
RECORDER = """#!/usr/bin/env bash
for word in "$0" "$@"; do printf '%s\\0' "$word"; done >> "$RECORD/argv"
printf '\\n' >> "$RECORD/argv"
[ "${0##*/}" != sbatch ] || cat > "$RECORD/batch"
"""


class Different(Exception):
    """The parser shows another size than the hand count."""


def same(row, **found):
    for name, value in found.items():
        if row[name] and value is not None and int(row[name]) != int(value):
            raise Different(f"{name} is {value}, by hand {row[name]}")


def recorded(root, words, environment):
    """The words after the training program's name, as the script gives them."""
    with tempfile.TemporaryDirectory() as folder:
        for name in PROGRAMS:
            path = pathlib.Path(folder) / name
            path.write_text(RECORDER)
            path.chmod(0o755)
        variables = {**os.environ, **environment, "RECORD": folder, "PATH": f"{folder}:{os.environ['PATH']}"}
        ended = subprocess.run(["bash", *words], cwd=root, env=variables, capture_output=True, text=True, check=False)
        batch, lines = pathlib.Path(folder) / "batch", pathlib.Path(folder) / "argv"
        started = [line.split("\0")[:-1] for line in lines.read_text().split("\n")] if lines.exists() else []
        if batch.exists():
            started.append(shlex.split(batch.read_text().split("-c \"", 1)[1].split("\" 2>&1", 1)[0]))
    for line in started:
        for at, word in enumerate(line):
            if word.endswith(("pretrain_gpt.py", "finetune.py", "train_mem.py")):
                return line[at + 1 :]
    raise RuntimeError(f"the script starts no training: {ended.stderr[-300:]}")


def megatron(root, file, row):
    import unittest.mock

    import torch
    from megatron.training import arguments

    gpus = row["gpus"] or "8"
    # What a user fills in: paths, and the cluster's own names.
    given = {"MLM_SKIP_INSTALL": "1", "MLM_MODEL_CKPT": "checkpoint", "WORLD_SIZE": "1", "OUTPUT_PATH": tempfile.mkdtemp(), "MEGATRON_PATH": str(root)}
    provider, lenient = None, False
    words = [file, *["given"] * 5]
    if "--checkpoint-path)" in (root / file).read_text():
        words = [file, "--checkpoint-path", given["OUTPUT_PATH"]]
    if "/modelopt/conf/" in file:
        # A model's options alone: its folder's fine-tuning script adds the rest, with options of its own program.
        path = pathlib.Path(file)
        words = ["examples/post_training/modelopt/finetune.sh", f"{path.parent.name}/{path.stem}"]
        from megatron.post_training.arguments import add_modelopt_args

        provider, lenient = add_modelopt_args, True
    sys.argv = ["pretrain_gpt.py", *recorded(root, words, given)]
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": gpus, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    if "fsdp" in file:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS")
    # It asks the GPU for its architecture; Hopper stands in.
    torch.cuda.get_device_properties = lambda *_: unittest.mock.MagicMock(major=9, minor=0)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    args = arguments.parse_args(provider, ignore_unknown_args=lenient)
    arguments.validate_args(args)
    same(
        row,
        layers=args.num_layers,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        experts=args.num_experts or 0,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
    )
    if args.group_query_attention and not args.multi_latent_attention:
        same(row, kv_heads=args.num_query_groups)


def megatron_bridge(_root, file, row):
    import bridge

    path, function = file.split(":")
    module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    with tempfile.TemporaryDirectory() as hub:
        config = bridge.recipe(module, function, row["gpus"], pathlib.Path(hub))
    model = config.model
    same(
        row,
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        kv_heads=None if model.multi_latent_attention else model.num_query_groups,
        experts=model.num_moe_experts or 0,
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        cp=model.context_parallel_size,
        ep=model.expert_model_parallel_size,
    )


def torchtitan(_root, file, row):
    import torch
    from torchtitan.components.quantization import float8

    # It asks the GPU whether it multiplies in 8 bits.
    float8.has_cuda_capability = lambda *_: True

    path, function = file.split(":")
    config = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)()
    config.__post_init__()
    axes = config.parallelism
    titan_mesh(axes, int(row["gpus"]), {"spmd_backend": axes.spmd_backend})
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    same(row, layers=len(model.layers), hidden=model.tok_embeddings.embedding_dim)
    same(
        row,
        tp=axes.tensor_parallel_degree,
        pp=axes.pipeline_parallel_degree,
        cp=axes.context_parallel_degree,
        ep=axes.expert_parallel_degree,
    )


def nanotron(root, file, row):
    from nanotron.config import get_config_from_file

    config = get_config_from_file(str(root / file))
    model, axes = config.model.model_config, config.parallelism
    same(row, layers=model.num_hidden_layers, hidden=model.hidden_size, heads=model.num_attention_heads)
    same(row, tp=axes.tp, pp=axes.pp, cp=axes.context_parallel_size, ep=axes.expert_parallel_size)


def axolotl(root, file, row):
    import yaml
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities

    text = yaml.safe_load((root / file).read_text())
    machine = {"bf16": True, "fp8": True, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_90"}
    config = AxolotlConfigWCapabilities(**text, capabilities=machine, env_capabilities={"torch_version": "2.11.0"})
    same(row, tp=config.tensor_parallel_size or 1, cp=config.context_parallel_size or 1)


def llama_factory(root, file, _row):
    os.environ["USE_MCA"] = "1" if "/megatron/" in file else "0"
    from transformers.utils import import_utils

    # A module that `absent` stands in for is no installed package.
    import_utils.PACKAGE_DISTRIBUTION_MAPPING.setdefault("flash_attn", ["flash-attn"])
    from llamafactory.hparams import parser
    from transformers import TrainingArguments, training_args
    from transformers.training_args import ParallelMode

    training_args.is_torch_bf16_gpu_available = lambda: True
    TrainingArguments.parallel_mode = ParallelMode.DISTRIBUTED
    TrainingArguments.world_size = 8
    parser.get_current_device = lambda: "cpu"
    sys.argv = ["launcher.py", str(root / file), "output_dir=/tmp/frameworks-llama-factory", "report_to=none"]
    parser.get_train_args()


def accelerate(root, file, row):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    words = ["--config_file", str(root / file), "train.py"]
    if "num_processes" not in (root / file).read_text():
        # The script beside it gives the number.
        words[:0] = ["--num_processes", row["gpus"] or "8"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    same(row, gpus=args.num_processes)
    if args.use_parallelism_config:
        same(row, tp=args.parallelism_config_tp_size, cp=args.parallelism_config_cp_size)


def deepspeed(root, file, row):
    text = (root / file).read_text()
    if '"auto"' in text:
        # Left to the Trainer, which fills these in.
        trainer_arguments({"deepspeed": str(root / file), "bf16": "bf16" in text})
        stage = json.loads(text).get("zero_optimization", {}).get("stage", 0)
    else:
        from deepspeed.runtime import config as module

        module.dist.get_rank = lambda: 0
        ranks = int(row["gpus"]) // int(row["tp"])
        mpu = type("Ranks", (), {"get_data_parallel_world_size": staticmethod(lambda: ranks)})
        stage = module.DeepSpeedConfig(str(root / file), mpu=mpu).zero_config.stage
    same(row, zero=stage)


def trainer_arguments(given):
    from transformers import TrainingArguments, training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
    return TrainingArguments(output_dir="/tmp/frameworks-trainer", report_to="none", **given)


def trainer(root, file, row):
    """The Trainer's arguments as each project's script has them parsed, by the classes that it extends them with."""
    from transformers import HfArgumentParser, training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
    # It asks the GPU whether it has TF32.
    training_args.is_torch_tf32_available = lambda: True
    if file.endswith(".sh"):
        from fastchat.train import train

        kinds = (train.ModelArguments, train.DataArguments, train.TrainingArguments)
        words = [word for word in recorded(root, [file], {})]
        model, _, args = HfArgumentParser(kinds).parse_args_into_dataclasses(words)
    else:
        from trl import ModelConfig, TrlParser

        own = importlib.import_module("open_r1.configs" if "open-r1" in str(root) else "alignment.configs")
        parser = TrlParser((own.ScriptArguments, own.SFTConfig, ModelConfig))
        _, args, model = parser.parse_args_and_config(["--config", str(root / file)])
    text = (root / file).read_text()
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if str(getattr(args, name)) not in text.split(name)[1].split("\n")[0]:
            raise Different(f"{name} is {getattr(args, name)}")
    if model.model_name_or_path.rsplit("/", 1)[-1] not in text:
        raise Different(f"the model is {model.model_name_or_path}")


JUDGES = {
    "transformers": trainer,
    "megatron-lm": megatron,
    "megatron-bridge": megatron_bridge,
    "torchtitan": torchtitan,
    "nanotron": nanotron,
    "axolotl": axolotl,
    "llama-factory": llama_factory,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
}
# What takes long to import, and is imported once for all files.
WARM = {"megatron-bridge": ["megatron.bridge.recipes", "megatron.bridge.training.config"]}
# Errors of this machine, not of the file.
OURS = ("ImportError", "ModuleNotFoundError", "OSError", "ConnectionError", "LocalEntryNotFoundError")


def main():
    sources, framework, *only = pathlib.Path(sys.argv[1]), *sys.argv[2:]
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    with open(HERE / "expected.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["framework"] == framework]
    rows = [row for row in rows if not only or row["repository"] in only]
    # What frameworks print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    out = csv.writer(answers, lineterminator="\n")
    for module in WARM.get(framework, []):
        importlib.import_module(module)
    for row in rows:
        root = sources / row["repository"].replace("/", "+")
        os.chdir(root)
        error = apart(functools.partial(JUDGES[framework], root, row["file"], row))
        verdict = "accepted" if error is None else "not judged" if error.startswith(OURS) else "refused"
        reason = " ".join((error or "").replace(str(sources), "").split())
        out.writerow([row["repository"], row["file"], verdict, reason[:240]])
        answers.flush()


if __name__ == "__main__":
    main()
