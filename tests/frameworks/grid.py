"""Gives a grid of plans to the frameworks' own parsers, and counts what they take.

Every plan is made by `estimate`, exported with a launch script, started through that script with a launcher that only
records its command line and environment, and read by the framework's parser, whose values `accept.py` compares with the
plan and the model. Usage: grid.py TOOL ENVIRONMENT WORK_FOLDER [TARGET …]; exit code 1 if a framework refuses an export.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections import Counter

HERE = pathlib.Path(__file__).parent
JOB = {"gpus": 16, "seq_len": 4096, "global_batch": 64}

DENSE = ["llama3-8b", "llama2-7b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "gemma2-9b", "gpt2-xl", "nemotron-4-15b", "starcoder2-3b", "phi3-mini"]
MIXTURES = ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"]
ALL = DENSE + MIXTURES

# Target, runtimes, models, strategies; what a runtime's space or a model does not allow is left out.
GRID = [
    ("megatron-lm", ["megatron-core"], ALL, ["zero=1", "tp=2,zero=1,recompute=selective", "tp=2,pp=2,zero=1,recompute=full", "tp=2,pp=2,vpp=2,schedule=interleaved,zero=1", "cp=2,cp_kind=ring,zero=1", "ep=4,zero=1"]),
    ("megatron-lm", ["megatron-fsdp"], DENSE, ["zero=3", "zero=3,dp_replicate=2,recompute=full", "tp=2,zero=2"]),
    ("torchtitan@0.3", ["torchtitan"], ALL, ["zero=3,recompute=full", "tp=2,zero=3", "pp=2,vpp=2,schedule=interleaved,zero=3", "zero=3,dp_replicate=2,reshard=off", "zero=0", "ep=8,zero=3"]),
    ("torchtitan@0.2", ["torchtitan"], ALL, ["zero=3,recompute=full", "tp=2,pp=2,zero=3", "zero=3,cp=2,cp_kind=all_gather", "zero=0"]),
    ("deepspeed@0.19", ["deepspeed"], ALL, ["zero=1", "zero=2,mbs=2", "zero=3,recompute=full", "zero=0"]),
    ("accelerate@1.15", ["fsdp2"], DENSE, ["zero=3,recompute=full", "zero=3,dp_replicate=2", "zero=2", "zero=0"]),
    ("axolotl@0.19", ["fsdp2"], DENSE, ["zero=3,mbs=2", "zero=3,dp_replicate=2,recompute=full", "zero=2"]),
    ("transformers", ["hf-trainer"], ALL, ["zero=3,recompute=full", "zero=2,mbs=2", "zero=0"]),
    ("transformers-deepspeed", ["hf-deepspeed"], DENSE, ["zero=1", "zero=3,recompute=full"]),
    ("nanotron", ["nanotron"], ALL, ["zero=1", "tp=2,pp=2,zero=1,recompute=full", "cp=2,cp_kind=all_gather,zero=1", "pp=2,schedule=gpipe"]),
]

# Sources that are not on PyPI: a folder of the environment with the commit's files, put on the path of imports.
SOURCES = {"megatron-lm": "src/megatron-lm", "nanotron": "src/nanotron/src", "torchtitan@0.2": "titan-0.2.2", "torchtitan@0.3": "titan-0.3.0"}

# A file of each target and one of its keys; misspelt, `export --check` must find it.
MISSPELT = {
    "megatron-lm": ("megatron_args.sh", "--micro-batch-size"),
    "torchtitan@0.3": ("vescale_plan_config.py", "tensor_parallel_degree"),
    "torchtitan@0.2": ("train.toml", "tensor_parallel_degree"),
    "deepspeed@0.19": ("ds_config.json", "train_batch_size"),
    "accelerate@1.15": ("accelerate.yaml", "num_processes"),
    "axolotl@0.19": ("axolotl.yaml", "gradient_checkpointing"),
    "transformers": ("training_args.json", "gradient_accumulation_steps"),
    "transformers-deepspeed": ("training_args.json", "gradient_accumulation_steps"),
    "nanotron": ("nanotron.yaml", "recompute_layer"),
}

RECORDER = """#!/usr/bin/env bash
for word in "$@"; do printf '%s\\0' "$word"; done > "$RECORD/argv"
env -0 > "$RECORD/env"
"""


def export(tool, folder, target, runtime, model, strategy):
    """The plan's outcome: `illegal`, `refused` by us, or `exported` with its files and recorded command."""
    folder.mkdir(parents=True)
    plan = folder / "a.plan.yaml"
    words = [tool, "estimate", "--model", model, "--gpus", JOB["gpus"], "--seq", JOB["seq_len"], "--global-batch", JOB["global_batch"], "--runtime", runtime, "--strategy", strategy, "-o", plan, "--quiet", "--json"]
    made = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if made.returncode not in (0, 3):
        return "illegal"
    answer = json.loads(made.stdout)
    facts = {**answer["strategy"], **JOB, "parameters": answer["inputs"]["parameters"], "model": model}
    (folder / "plan.json").write_text(json.dumps(facts))
    words = [tool, "export", plan, "--to", target, "-o", folder / "out", "--launcher", "torchrun", "--quiet", "--tokenizer", "org/tokenizer", "--data", "org/data", "--hf-id", "org/model"]
    written = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if written.returncode == 4:
        return "refused"
    if written.returncode != 0:
        raise SystemExit(f"{target} {model} {strategy}: {written.stderr}")
    launched(folder)
    return "exported"


def launched(folder):
    """Runs the launch script with a launcher that only records."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("torchrun", "accelerate"):
        (tools / name).write_text(RECORDER)
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(folder), "TRAIN_SCRIPT": "train.py", "RECIPE": "recipe:make"}
    subprocess.run(["bash", folder / "out" / "launch.sh"], env=environment, check=True, capture_output=True)


def judged(environment, target, folders):
    """What the framework's parser says of each folder: nothing, or why it refuses it."""
    path = [str(HERE)]
    if target in SOURCES:
        source = environment / SOURCES[target]
        if not source.exists():
            return None
        path.append(str(source))
    variables = {**os.environ, "PYTHONPATH": ":".join(path), "LD_LIBRARY_PATH": str(environment / "stubs")}
    words = [environment / "venv/bin/python", "-W", "ignore", HERE / "accept.py", "--many", target]
    text = "\n".join(str(folder) for folder in folders)
    ended = subprocess.run(words, input=text, capture_output=True, text=True, env=variables, cwd=folders[0], check=False)
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"folder"')]
    if len(answers) != len(folders):
        raise SystemExit(f"{target}: the parser ended early\n{ended.stderr[-2000:]}")
    return {answer["folder"]: answer["error"] for answer in answers}


def misspelt(tool, folder, target):
    """Whether `export --check` finds a misspelt key in an exported file."""
    name, key = MISSPELT[target]
    text = (pathlib.Path(folder) / "out" / name).read_text()
    wrong = pathlib.Path(folder) / name
    wrong.write_text(text.replace(key, key[:-1], 1))
    words = [tool, "export", "--check", wrong, "--to", target, "--quiet"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 4


def main():
    tool, environment, work = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    wanted = sys.argv[4:]
    counts, failures, exported = {}, [], {}
    for number, (target, runtimes, models, strategies) in enumerate(GRID):
        if wanted and target not in wanted:
            continue
        count = counts.setdefault(target, Counter())
        for runtime in runtimes:
            for model in models:
                for at, strategy in enumerate(strategies):
                    folder = work / f"{number}-{runtime}-{model}-{at}"
                    outcome = export(tool, folder, target, runtime, model, strategy)
                    count[outcome] += 1
                    if outcome == "exported":
                        exported.setdefault(target, []).append((str(folder), f"{model} {strategy}"))
    for target, plans in exported.items():
        if not misspelt(tool, plans[0][0], target):
            failures.append(f"{target}: a misspelt {MISSPELT[target][1]} is not found")
        answers = judged(environment, target, [folder for folder, _ in plans])
        if answers is None:
            counts[target]["not judged"] = len(plans)
            continue
        for folder, name in plans:
            error = answers[folder]
            counts[target]["accepted" if error is None else "wrong"] += 1
            if error is not None:
                failures.append(f"{target} {name}: {error}")
    print("| target | plans | refused by us | exported | taken by its parser, as planned | refused or read otherwise |")
    print("|---|---|---|---|---|---|")
    for target, count in counts.items():
        plans = count["refused"] + count["exported"]
        taken = "no source here" if count["not judged"] else count["accepted"]
        print(f"| {target} | {plans} | {count['refused']} | {count['exported']} | {taken} | {count['wrong']} |")
    for failure in failures:
        print(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
