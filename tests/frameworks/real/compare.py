"""Imports and checks each file of `expected.csv`, writes `outcomes.csv`, and prints counts by framework.

An outcome is `imported` (the model and the parallel sizes are those counted by hand), `wrong` (another model or size) or
`refused` (the import fails), each with `checked` (no error) or `false error`, and the first message where there is one.
Files that the framework's own parser refuses (`judged.csv`, in the parser's words) are counted apart.
"""

import collections
import concurrent.futures
import csv
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
FACTS = ("layers", "hidden", "heads", "kv_heads", "experts")
SIZES = ("tp", "pp", "cp", "ep", "zero")


def main() -> int:
    program, sources, *frameworks = sys.argv[1:]
    program = str(pathlib.Path(program).resolve())
    with open(HERE / "expected.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not frameworks or row["framework"] in frameworks]
    with open(HERE / "judged.csv", encoding="utf-8") as file:
        judged = {(row["repository"], row["file"]): row["verdict"] for row in csv.DictReader(file)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda row: outcome(program, pathlib.Path(sources), row), rows))
    if not frameworks:
        with open(HERE / "outcomes.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["framework", "repository", "file", "import", "check", "message"])
            writer.writerows(outcomes)
    counts = collections.defaultdict(collections.Counter)
    for framework, repository, file, imported, checked, message in outcomes:
        verdict = judged.get((repository, file), "not judged")
        if verdict == "refused":
            counts[framework].update({"refused by its parser": 1, "error found": checked == "false error"})
            continue
        good = imported == "imported" and checked == "checked"
        counts[framework].update(files=1, good=good, **{verdict: 1, imported: 1, checked: 1})
        if not good:
            print(f"{framework}: {file}: {imported}, {checked}: {message}")
    for framework, count in counts.items():
        print(f"{framework:<16}", *(f"{name} {count[name]:>3}" for name in (
            "files", "accepted", "good", "imported", "wrong", "refused", "false error", "refused by its parser",
            "error found")), sep="  ")
    good, files = (sum(count[name] for count in counts.values()) for name in ("good", "files"))
    print(f"{good} of {files}")
    return 0 if good >= 0.95 * files else 1


def outcome(program: str, sources: pathlib.Path, row: dict) -> list:
    root = sources / row["repository"].replace("/", "+")
    given = [option for name in ("model", "gpus") if row[name] for option in (f"--{name}", row[name])]
    target = ["--from", row["framework"]] if row["framework"] == "deepspeed" else []

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([program, *words], cwd=root, capture_output=True, text=True, timeout=600)

    answer = run("import", row["file"], "--cluster", "dgx-h100", "--json", *given, *target)
    if answer.returncode:
        imported, message = "refused", " ".join(answer.stderr.split())
    else:
        imported, message = compared(json.loads(answer.stdout), row)
    to = ["--to", row["framework"]] if target else []
    model = ["--model", row["model"]] if row["model"] else []
    check = run("export", "--check", row["file"], "--json", *to, *model)
    errors = []
    if check.stdout:
        errors = [f for f in json.loads(check.stdout)["findings"] if f["severity"] == "error"]
    if check.returncode:
        said = f"{errors[0]['key']}: {errors[0]['message']}" if errors else " ".join(check.stderr.split())
        message = "; ".join(part for part in (message, said) if part)
    return [row["framework"], row["repository"], row["file"], imported, "false error" if check.returncode else "checked",
            message[:300]]


def compared(answer: dict, row: dict) -> tuple:
    read = {**answer["model"], **answer["strategy"]}
    different = [
        f"{name} {read[name]}, not {row[name]}"
        for name in FACTS + SIZES
        if row[name] and int(row[name]) != (read[name] or 0)
    ]
    return ("wrong", ", ".join(different)) if different else ("imported", "")


if __name__ == "__main__":
    sys.exit(main())
