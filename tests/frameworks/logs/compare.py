"""Diagnoses each log of `expected.csv` against a plan with the log's tokens and sequences per step, and compares the
number of timed steps and their median with the counts."""

import csv
import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

HERE = pathlib.Path(__file__).parent
# A median of an even number of steps may be either of the middle two.
TOLERANCE = 0.03


def main() -> int:
    program, sources = (pathlib.Path(path).resolve() for path in sys.argv[1:])
    with open(HERE / "expected.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with tempfile.TemporaryDirectory() as folder:
        wrong = [said for said in (differs(program, sources, pathlib.Path(folder), row) for row in rows) if said]
    print("\n".join(wrong + [f"{len(rows) - len(wrong)} of {len(rows)} logs"]))
    return 1 if wrong else 0


def differs(program: pathlib.Path, sources: pathlib.Path, folder: pathlib.Path, row: dict) -> str:
    name = f"{row['format']}: {row['repository']}: {row['file']}"
    log = folder / ("log" + pathlib.Path(row["file"]).suffix)
    lines = fetched(sources, row).splitlines(keepends=True)
    if row["lines"]:
        first, last = map(int, row["lines"].split("-"))
        lines = lines[first - 1 : last]
    log.write_text("".join(lines), encoding="utf-8")
    plan = folder / "plan.yaml"
    job = ["--model", "gpt2", "--gpus", row["gpus"], "--seq", row["seq"], "--global-batch", row["batch"]]
    asked = run(program, "estimate", *job, "--strategy", "zero1", "-o", str(plan), "--force", "--json")
    if not plan.exists():
        return f"{name}: {asked.stderr}"
    answer = run(program, "diagnose", str(log), "--plan", str(plan), "--warmup", "0", "--json")
    if answer.returncode:
        return f"{name}: {' '.join(answer.stderr.split())}"
    measured = json.loads(answer.stdout)["measured"]
    found, median = measured[row["quantity"]], float(row["median"])
    if measured["steps"] != int(row["steps"]) or abs(found / median - 1) > TOLERANCE:
        return f"{name}: {measured['steps']} steps of {found}, not {row['steps']} of {median}"
    return ""


def run(program: pathlib.Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(program), *words], capture_output=True, text=True, check=False, timeout=600)


def fetched(sources: pathlib.Path, row: dict) -> str:
    path = sources / row["repository"].replace("/", "+") / row["file"]
    if not path.exists():
        url = f"https://raw.githubusercontent.com/{row['repository']}/{row['commit']}/{row['file']}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=60) as answer:
            path.write_bytes(answer.read())
    return path.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main())
