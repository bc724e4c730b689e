"""Steps and memory of Hugging Face's Trainer on one GPU, beside what is predicted for the runtime `hf-trainer`.

    python3 tests/gpu/hf_times.py VESCALE_PLAN tests/gpu/hf_cases.json OUT.json [SECONDS]

Models have the sizes of published ones and random weights, in 32 bits under bf16 autocast; nothing is downloaded. Every case
runs in a process of its own, in the order of the list until SECONDS [240] are over, and OUT.json is written after each. A case
that fails is written with its error. Nothing here has a limit: it shows how far off predictions are that were fitted to
other people's runs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

WARM, ROW, ROWS = 4, 4, 3
STEPS = WARM + ROW * ROWS
CLUSTERS = {"H100": "dgx-h100", "H200": "dgx-h200"}


def train(case):
    """Trains a case in this process; prints its seconds per step and its memory as JSON."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None
    config = dict(case["config"])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids = torch.randint(0, case["config"]["vocab_size"], (case["mbs"] * STEPS, case["seq"]))
    seconds = []

    class Timer(TrainerCallback):
        """Times rows of steps, data loading between them included; the device is waited for at their ends only."""

        def __init__(self):
            self.steps, self.begin = 0, 0.0

        def on_step_end(self, *_, **__):
            self.steps += 1
            if self.steps >= WARM and (self.steps - WARM) % ROW == 0:
                wait()
                now = time.perf_counter()
                if self.steps > WARM:
                    seconds.append((now - self.begin) / ROW)
                self.begin = now

    recomputes = case["recompute"] == "full"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=case["mbs"], bf16=True, use_cpu=not cuda,
            gradient_checkpointing=recomputes, gradient_checkpointing_kwargs={"use_reentrant": False} if recomputes else None,
            logging_steps=STEPS, save_strategy="no", report_to="none", disable_tqdm=True,
            **({"optim": case["optim"]} if "optim" in case else {}))
        rows = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Timer()]).train()
    used = torch.cuda.mem_get_info() if cuda else (0, 0)
    memory = {
        "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        "device": used[1] - used[0],
    }
    print(json.dumps({"step_time_s": statistics.median(seconds), "rows_s": seconds, "memory_bytes": memory}))


def predict(binary, case, gpu, folder):
    if "optim" in case:
        return {"error": "hf-trainer stands for the Trainer's default optimizer"}
    path = os.path.join(folder, "model.json")
    with open(path, "w") as file:
        json.dump(case["config"], file)
    cluster = next((preset for word, preset in CLUSTERS.items() if word in gpu), "dgx-h200")
    command = [binary, "estimate", "--model", path, "--cluster", cluster, "--runtime", "hf-trainer", "--gpus", "1", "--json"]
    command += ["--precision", "bf16", "--seq", str(case["seq"]), "--global-batch", str(case["mbs"])]
    command += ["--strategy", f"mbs={case['mbs']},recompute={case['recompute']}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout)["predicted"] if done.returncode in (0, 3) else {"error": " ".join(done.stderr.split())}


def main(binary, listed, out, seconds="240"):
    end = time.monotonic() + float(seconds)
    with open(listed) as file:
        cases = json.load(file)["cases"]
    query = subprocess.run("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader", shell=True, capture_output=True, text=True)
    answer = {"gpu": query.stdout.strip(), "runs": []}
    for case in cases:
        left = end - time.monotonic()
        if left < 20:
            break
        row = {key: value for key, value in case.items() if key != "config"}
        try:
            command = [sys.executable, __file__, "--train", json.dumps(case)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            row |= json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-600:]}
        except subprocess.TimeoutExpired:
            row["error"] = "no time left"
        with tempfile.TemporaryDirectory() as folder:
            row["predicted"] = predict(binary, case, answer["gpu"], folder)
        measured, predicted = row.get("step_time_s"), row["predicted"].get("step_time_s")
        row["error_of_time"] = predicted / measured - 1 if measured and predicted else None
        answer["runs"].append(row)
        with open(out, "w") as file:
            json.dump(answer, file, indent=1)
        print(case["name"], measured, predicted, row["error_of_time"], row.get("error", ""))


if sys.argv[1] == "--train":
    train(json.loads(sys.argv[2]))
else:
    main(*sys.argv[1:])
