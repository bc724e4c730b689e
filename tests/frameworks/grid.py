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
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).parent
JOB = {"gpus": 16, "seq_len": 4096, "global_batch": 64}

# Of every model type of this library one model, of Llama one of each generation.
TYPES = {
    "llama": ["llama2-7b", "llama3-8b", "llama3.2-1b", "smollm2-1.7b"],
    "llama4": ["llama4-scout"],
    "mistral": ["mistral-7b"],
    "mixtral": ["mixtral-8x7b"],
    "qwen2": ["qwen2.5-7b"],
    "qwen3": ["qwen3-8b"],
    "qwen3_moe": ["qwen3-30b-a3b"],
    "qwen3_next": ["qwen3-next-80b-a3b"],
    "deepseek_v2": ["deepseek-v2-lite"],
    "deepseek_v3": ["deepseek-v3"],
    "gpt_oss": ["gpt-oss-20b"],
    "gpt2": ["gpt2-xl"],
    "nemotron": ["nemotron-4-15b"],
    "nemotron_h": ["nemotron-h-8b"],
    "gemma2": ["gemma2-9b"],
    "gemma3_text": ["gemma3-12b"],
    "starcoder2": ["starcoder2-7b"],
    "phi3": ["phi3-mini"],
    "olmo2": ["olmo2-7b"],
    "olmo3": ["olmo3-7b"],
    "glm4_moe": ["glm4.5-air"],
    "minimax_m2": ["minimax-m2"],
    "ernie4_5_moe": ["ernie4.5-21b-a3b"],
    "bloom": ["bloom-7b1"],
    "falcon": ["falcon-7b"],
    "gpt_neox": ["gpt-neox-20b"],
    "mpt": ["mpt-7b"],
    "opt": ["opt-6.7b"],
}
# Longest sequence of a model whose table of positions is shorter than the job's sequence.
SHORT = {"gpt2-xl": 1024, "bloom-7b1": 2048, "falcon-7b": 2048, "gpt-neox-20b": 2048, "mpt-7b": 2048, "opt-6.7b": 2048}

# A target that describes the model is asked for the models that its own source has, refused ones included: the model
# types of its registry or of its examples, or, where a file can only name a flavor, the models that are flavors. Every
# other model of TYPES is foreign to it, and counted apart.
OWN = {
    # examples/{gpt3,llama,mixtral,gptoss}, examples/post_training/modelopt/conf
    "megatron-lm": ["gpt2", "llama", "llama4", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "nemotron", "nemotron_h"],
    # register_bridge in src/megatron/bridge/models
    "megatron-bridge": ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "gpt_oss", "nemotron", "nemotron_h", "gemma2", "gemma3_text", "glm4_moe", "minimax_m2", "ernie4_5_moe"],
    # torchtitan/models/*/__init__.py; the flavors 16B and 236B of deepseek_v3 are DeepSeek-V2
    "torchtitan@0.3": ["llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"],
    "torchtitan@main": ["llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"],
    # CONFIG_TO_MODEL_CLASS in src/nanotron/trainer.py
    "nanotron": ["llama", "qwen2", "starcoder2"],
}
# The flavors of torchtitan 0.2 (torchtitan/models/*/__init__.py) that this library has.
FLAVORS = ["llama3-8b", "llama3-70b", "llama3.1-405b", "llama4-scout", "llama4-maverick", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"]
# Files that hold no model go with any that the hub has.
DENSE = ["llama3-8b", "llama2-7b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "gemma2-9b", "gpt2-xl", "nemotron-4-15b", "starcoder2-3b", "phi3-mini"]
ANY = [*DENSE, "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"]


def own(target):
    """The models that a target is asked for."""
    if target == "torchtitan@0.2":
        return FLAVORS
    return [model for kind in OWN[target] for model in TYPES[kind]]


def foreign(target):
    """The models of the other types; for files that hold no model, none."""
    if target not in OWN and target != "torchtitan@0.2":
        return []
    asked = own(target)
    return [model for models in TYPES.values() for model in models if model not in asked]


CORE = ["zero=1", "tp=2,zero=1,recompute=selective", "tp=2,pp=2,zero=1,recompute=full", "tp=2,pp=2,vpp=2,schedule=interleaved,zero=1", "cp=2,cp_kind=ring,zero=1", "ep=4,zero=1"]
# What is overlapped, captured, kept in host memory and in which types; of experts, how tokens are sent.
CORE += ["tp=2,zero=1,overlap=grad+param+tp", "zero=1,graphs=layers", "zero=1,graphs=step", "zero=1,offload=optimizer:50", "zero=1,offload_layers=4", "zero=1,grad_dtype=bf16,optim_states=bf16_moments"]
CORE += ["ep=4,zero=1,dispatcher=all_gather", "ep=4,zero=1,dispatcher=deepep,overlap=grad+param+ep", "ep=4,zero=1,dispatcher=hybridep,graphs=layers"]
# In 8 bits, with every way to scale operands; microscaled numbers need Blackwell.
EIGHT_BITS = ["fp8: zero=1", "fp8: tp=2,zero=1,fp8_recipe=tensorwise,recompute=selective:norms", "fp8: zero=1,fp8_recipe=blockwise", "fp8: tp=2,pp=2,zero=1,fp8_recipe=mxfp8"]
FSDP = ["zero=3", "zero=3,dp_replicate=2,recompute=full", "tp=2,zero=2"]
TITAN = ["zero=3,recompute=full", "tp=2,zero=3", "tp=2,etp=2,zero=3", "pp=2,vpp=2,schedule=interleaved,zero=3", "zero=3,dp_replicate=2,reshard=off", "zero=0", "ep=8,zero=3"]
TITAN += ["zero=3,graphs=step", "ep=8,zero=3,dispatcher=deepep"]
# Target, runtime, models, strategies; what a runtime's space or a model does not allow is left out.
GRID = [
    ("megatron-lm", "megatron-core", own("megatron-lm"), CORE),
    ("megatron-lm", "megatron-fsdp", own("megatron-lm"), FSDP),
    ("megatron-bridge", "megatron-core", own("megatron-bridge"), CORE),
    ("megatron-bridge", "megatron-fsdp", own("megatron-bridge"), FSDP),
    ("torchtitan@0.3", "torchtitan", own("torchtitan@0.3"), TITAN),
    ("torchtitan@main", "torchtitan", own("torchtitan@main"), TITAN),
    ("torchtitan@0.2", "torchtitan", own("torchtitan@0.2"), ["zero=3,recompute=full", "tp=2,pp=2,zero=3", "zero=3,cp=2,cp_kind=all_gather", "zero=0"]),
    ("megatron-lm", "megatron-core", ["llama3-8b", "qwen3-30b-a3b"], EIGHT_BITS),
    ("megatron-bridge", "megatron-core", ["llama3-8b", "qwen3-30b-a3b"], EIGHT_BITS),
    # Later editions read float8 with torchao alone, and scale rows: a plan with a scale for each tensor is refused by us.
    ("torchtitan@main", "torchtitan", ["llama3-8b"], ["fp8: zero=3"]),
    ("torchtitan@0.2", "torchtitan", ["llama3-8b"], ["fp8: zero=3,fp8_recipe=rowwise", "fp8: zero=3"]),
    ("deepspeed@0.19", "deepspeed", ANY, ["zero=1", "zero=2,mbs=2", "zero=3,recompute=full", "zero=0", "zero=1,offload=optimizer", "zero=3,offload=parameters", "zero=3,prefetch=2", "zero=2,grad_dtype=fp32"]),
    ("accelerate@1.15", "fsdp2", DENSE, ["zero=3,recompute=full", "zero=3,dp_replicate=2", "zero=3,reshard=off", "zero=0", "zero=3,offload=parameters"]),
    ("axolotl@0.19", "fsdp2", DENSE, ["zero=3,mbs=2", "zero=3,dp_replicate=2,recompute=full", "zero=3,reshard=off", "zero=3,offload=parameters"]),
    ("transformers", "hf-trainer", ANY, ["zero=3,recompute=full", "zero=3,reshard=off,mbs=2", "zero=0", "zero=3,optim_states=8bit_moments"]),
    ("transformers-deepspeed", "hf-deepspeed", DENSE, ["zero=1", "zero=3,recompute=full", "zero=3,offload=parameters"]),
    ("llama-factory", "hf-deepspeed", DENSE, ["zero=1", "zero=2,mbs=2", "zero=3,recompute=full", "zero=2,offload=optimizer"]),
    ("nanotron", "nanotron", own("nanotron"), ["zero=0", "tp=2,pp=2,recompute=full", "cp=2,cp_kind=all_gather", "pp=2,schedule=gpipe"]),
]

# Sources that are not on PyPI: folders of the environment with the commit's files, put on the path of imports.
SOURCES = {
    "megatron-lm": ["src/megatron-lm"],
    "megatron-bridge": ["transformers-5.12", "src/megatron-bridge/src", "src/megatron-lm-of-bridge"],
    "nanotron": ["src/nanotron/src"],
    "torchtitan@0.2": ["titan-0.2.2"],
    "torchtitan@0.3": ["titan-0.3.0"],
    "torchtitan@main": ["src/torchtitan-main"],
    "llama-factory": ["src/llama-factory/src"],
}

# A file of each target and one of its keys; misspelt, `export --check` must find it.
MISSPELT = {
    "megatron-lm": ("megatron_args.sh", "--micro-batch-size"),
    "megatron-bridge": ("vescale_plan_bridge.py", "tensor_model_parallel_size"),
    "torchtitan@0.3": ("vescale_plan_config.py", "tensor_parallel_degree"),
    "torchtitan@main": ("vescale_plan_config.py", "tensor_parallel_degree"),
    "llama-factory": ("llamafactory.yaml", "gradient_accumulation_steps"),
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


def export(tool, folder, target, runtime, model, strategy, strange):
    """The plan's outcome: `illegal`, `refused` by us, or `exported` with its files and recorded command; and what we say."""
    folder.mkdir(parents=True)
    plan = folder / "a.plan.yaml"
    job = {**JOB, "seq_len": SHORT.get(model, JOB["seq_len"])}
    eight_bits, strategy = strategy.startswith("fp8: "), strategy.removeprefix("fp8: ")
    precision = ["--precision", "fp8"] if eight_bits else []
    cluster = ["--cluster", "dgx-b200"] if "mxfp8" in strategy else []
    words = [tool, "estimate", *precision, *cluster, "--model", model, "--gpus", job["gpus"], "--seq", job["seq_len"], "--global-batch", job["global_batch"], "--runtime", runtime, "--strategy", strategy, "-o", plan, "--quiet", "--json"]
    made = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if made.returncode not in (0, 3):
        return "illegal", made.stderr
    answer = json.loads(made.stdout)
    facts = {**answer["strategy"], **job, "parameters": answer["inputs"]["parameters"], "model": model}
    # Bridge reads a model of its own from the hub, for which the judge puts a folder; it starts from its plain GPT otherwise.
    of_bridge = target == "megatron-bridge"
    facts["hub"] = of_bridge and not strange
    hub = [] if of_bridge and strange else ["--hf-id", folder / "hub" if of_bridge else "org/model"]
    (folder / "plan.json").write_text(json.dumps(facts))
    words = [tool, "export", plan, "--to", target, "-o", folder / "out", "--launcher", "torchrun", "--quiet", "--tokenizer", "org/tokenizer", "--data", "org/data", *hub]
    written = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if written.returncode == 4:
        return "refused", written.stderr
    if written.returncode != 0:
        raise SystemExit(f"{target} {model} {strategy}: {written.stderr}")
    launched(folder, folder.parent / "launchers")
    return "exported", ""


def recorders(tools):
    """Makes launchers that only record. Before threads start: a file cannot be run while another process has it open to write."""
    tools.mkdir()
    for name in ("torchrun", "accelerate"):
        (tools / name).write_text(RECORDER)
        (tools / name).chmod(0o755)


def launched(folder, tools):
    """Runs the launch script with the launchers in `tools`."""
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(folder), "TRAIN_SCRIPT": "train.py", "RECIPE": "recipe:make"}
    # No option gives axolotl's learning rate.
    for file in (folder / "out").glob("axolotl.yaml"):
        file.write_text(file.read_text().replace("FILL_IN_LEARNING_RATE", "1e-4"))
    subprocess.run(["bash", folder / "out" / "launch.sh"], env=environment, check=True, capture_output=True)


def judged(environment, target, folders):
    """What the framework's parser says of each folder: nothing, or why it refuses it."""
    sources = [environment / source for source in SOURCES.get(target, [])]
    if not all(source.exists() for source in sources):
        return None
    path = [str(HERE), *map(str, sources)]
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


def questions(wanted):
    """Every question of the grid, then those for foreign models: target, runtime, model, strategy, whether foreign."""
    asked = []
    for target, runtime, models, strategies in GRID:
        if not wanted or target in wanted:
            asked += [(target, runtime, model, strategy, False) for model in models for strategy in strategies]
    known = {target: (runtime, strategies[0]) for target, runtime, _, strategies in reversed(GRID)}
    for target, (runtime, strategy) in known.items():
        if not wanted or target in wanted:
            asked += [(target, runtime, model, strategy, True) for model in foreign(target)]
    return asked


def table(counts, names):
    """Prints the counts of each target."""
    print("| target | plans | refused by us | exported | taken by its parser, as planned | refused or read otherwise |")
    print("|---|---|---|---|---|---|")
    total = Counter()
    for target in names:
        count = counts[target]
        total.update(count)
        show(target, count)
    show("all", total)


def show(name, count):
    """Prints one line of the table."""
    taken = f"{count['accepted']}" if not count["not judged"] else f"{count['accepted']}, {count['not judged']} not judged"
    plans = count["refused"] + count["exported"]
    print(f"| {name} | {plans} | {count['refused']} | {count['exported']} | {taken} | {count['wrong']} |")


def main():
    tool, environment, work = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    asked = questions(sys.argv[4:])
    own_counts, foreign_counts, failures, exported = {}, {}, [], {}
    recorders(work / "launchers")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(lambda at: export(tool, work / str(at), *asked[at]), range(len(asked)))
        for at, (outcome, said) in enumerate(outcomes):
            target, _, model, strategy, strange = asked[at]
            count = (foreign_counts if strange else own_counts).setdefault(target, Counter())
            count[outcome] += 1
            name = f"{model} {strategy}"
            if outcome == "exported":
                exported.setdefault(target, []).append((str(work / str(at)), name, count))
            if outcome == "refused" and os.environ.get("REASONS"):
                print(f"{target} {name}: {said.strip()}")
            if strange and outcome == "refused" and "\n  model " not in said:
                failures.append(f"{target} {name}: refused, but not by a part of the model: {said.strip()}")
    for target, plans in exported.items():
        if not misspelt(tool, plans[0][0], target):
            failures.append(f"{target}: a misspelt {MISSPELT[target][1]} is not found")
        answers = judged(environment, target, [folder for folder, *_ in plans])
        for folder, name, count in plans:
            error = None if answers is None else answers[folder]
            count["not judged" if answers is None else "accepted" if error is None else "wrong"] += 1
            if error is not None:
                failures.append(f"{target} {name}: {error}")
    table(own_counts, own_counts)
    print("\nModels that a target's own source does not have:\n")
    table(foreign_counts, foreign_counts)
    for failure in failures:
        print(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
