"""Trains the models of a list, each in several ways, and sets what was measured beside what was predicted.

    python3 tests/gpu/train.py VESCALE_PLAN CASES.json PROFILE.yaml OUT.json [TORCH.json]

Times are predicted twice: with the presets only, and with the profile of this GPU, to which what a plan needs is added first.
Exits with 1 where a run fails, where a prediction is further off than CASES.json allows, where the host holds up more of a captured
step than that allows, where a counted byte is not the predicted one (the most in use of all: by more than 2%), where a loss is no number or not
that of the same steps queued kernel by kernel (within 0.2% where a library runs core attention), or where our tokens per second are under 0.8 of
PyTorch's (TORCH.json, of torch_train.py). Nothing here is told how long a run took before it predicts. OUT.json is written after every
run, so one that is stopped leaves what it has seen.
"""

import array
import json
import math
import os
import random
import subprocess
import sys
import tempfile

FLOOR = 0.8
PEAK = "most in use of all"


def differs(line):
    counted, predicted = line["measured_bytes"], line["predicted_bytes"]
    return abs(predicted - counted) > 0.02 * counted if line["name"] == PEAK else predicted != counted


def agree(one, other):
    """Whether two runs of the same steps have the same losses: to the bit, but where a library adds up in no order."""
    near = 2e-3 if other.get("attention_library") else 0.0
    pairs = zip(one.get("losses", []), other.get("losses", []), strict=False)
    return all(abs(a - b) <= near * abs(a) for a, b in pairs)


def tokens(path, count=1 << 20, vocabulary=32000):
    draw = random.Random(1)
    data = array.array("I", (draw.randrange(vocabulary) for _ in range(count)))
    with open(path, "wb") as file:
        data.tofile(file)


def cluster(clusters):
    """The preset of the GPU that is here; the first of the list where nothing tells."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        name = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        name = ""
    found = [preset for word, preset in clusters.items() if word in name]
    return (found or list(clusters.values()))[0]


def ask(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(" ".join(done.stderr.split()) or f"exit code {done.returncode}")
    return json.loads(done.stdout)


def complete(binary, device, model, strategy, plan, profile, done=set()):
    """Adds to a profile what it lacks of a plan: shapes are those of other plans with the model and micro-batch."""
    shapes = model["name"], strategy.split(",")[0]
    if shapes not in done:
        ask([binary, "profile", plan, "--device", device, "-o", profile, "--json", "--quiet"])
        done.add(shapes)


def off(errors, limits):
    """What is predicted further off than it may be, or not at all."""
    found = []
    for by, limit in limits.items():
        if errors[by] is None:
            found.append(f"step time by {by}: not predicted")
        elif abs(errors[by]) > limit:
            found.append(f"step time by {by}: {errors[by]:+.1%}")
    return found


def gap(measured, limit):
    """What of a captured step the GPU does not take, if it is too much."""
    captured = measured["captured_time_s"]
    share = 0.0 if captured is None else 1 - captured / measured["step_time_s"]
    return [f"the host holds up {share:.1%} of a captured step"] if share > limit else []


def train(binary, cases, model, strategy, execution, profile, folder):
    plan, data = os.path.join(folder, "plan.yaml"), os.path.join(folder, "tokens.u32.bin")
    shape = ["--seq", str(model["seq"]), "--global-batch", str(model["global_batch"])]
    estimate = [binary, "estimate", "--model", model["model"], "--cluster", cluster(cases["clusters"])]
    estimate += ["--runtime", cases["runtime"], "--gpus", "1", "--precision", "bf16", "--strategy", strategy]
    preset = ask([*estimate, *shape, "-o", plan, "--json"])["predicted"]
    if profile:
        complete(binary, cases["device"], model, strategy, plan, profile)
    run = [binary, "run", plan, "--device", cases["device"], "--steps", str(cases["steps"]), "--data", data, "--json"]
    run += [] if execution == "replayed" else ["--execution", execution]
    measured = ask([*run, "--profile", profile] if profile else run)
    losses = [step["loss"] for step in measured["losses"]]
    seconds = measured["step_time_s"]
    error = lambda predicted: None if predicted is None else predicted / seconds - 1
    errors = {"presets": error(preset["step_time_s"]), "profile": error(measured["predicted_step_time_s"])}
    return {
        "step_time_s": seconds,
        "tokens_per_s": measured["tokens_per_s"],
        "losses": losses,
        "captured_time_s": measured["captured_time_s"],
        "attention_library": measured["attention_library"],
        "step_time_error": errors,
        "memory": measured["memory"],
        "failed": [f"{line['name']}: bytes differ" for line in measured["memory"] if differs(line)]
        + ["a loss is no number" for loss in losses if not math.isfinite(loss)]
        + gap(measured, cases.get("host", 1.0))
        + off(errors, cases.get("limits", {})),
    }


def main():
    binary, listed, profile, out, *torch = sys.argv[1:]
    with open(listed) as file:
        cases = json.load(file)
    theirs = {}
    if torch and os.path.exists(torch[0]):
        with open(torch[0]) as file:
            theirs = json.load(file)
    profile = profile if os.path.exists(profile) else None
    rows = []

    def write(finished):
        answer = {"runs": rows, "pytorch": theirs, "passed": finished and not any(row["failed"] for row in rows)}
        with open(out, "w") as file:
            json.dump(answer, file, indent=1)
        return answer["passed"]

    with tempfile.TemporaryDirectory() as folder:
        tokens(os.path.join(folder, "tokens.u32.bin"))
        for model in cases["models"]:
            queued = [(strategy, "replayed") for strategy in model["strategies"]]
            for strategy, execution in queued + [(strategy, "graph") for strategy in model.get("graph", [])]:
                row = {"model": model["name"], "strategy": strategy, "execution": execution}
                try:
                    row |= train(binary, cases, model, strategy, execution, profile, folder)
                except RuntimeError as error:
                    row["failed"] = [str(error)]
                same = [r for r in rows if r["model"] == row["model"] and r["strategy"] == strategy]
                if not all(agree(r, row) for r in same):
                    row["failed"].append("losses are not those of the same steps queued kernel by kernel")
                rows.append(row)
                write(finished=False)
                print(row["model"], strategy, execution, row.get("step_time_s"), *row["failed"])
            best = max((row.get("tokens_per_s", 0) for row in rows if row["model"] == model["name"]), default=0)
            other = theirs.get(model["name"], {}).get("tokens_per_s")
            if other and best < FLOOR * other:
                rows[-1]["failed"].append(f"{best:.0f} tokens/s at best, PyTorch {other:.0f}")
    sys.exit(0 if write(finished=True) else 1)


main()
