"""Installs a wheel into a fresh environment and runs there, without Rust or the repository, the Python of
python/README.md's section on planning: `python3 release/check.py WHEEL`."""

import pathlib
import re
import subprocess
import sys
import tempfile
import venv

README = pathlib.Path(__file__).parents[1] / "python/README.md"


def main():
    wheel = pathlib.Path(sys.argv[1]).resolve()
    lines = re.search(r"^## Plan\n\n```python\n(.*?)^```", README.read_text(), re.S | re.M)
    assert lines, "python/README.md has no section on planning"
    with tempfile.TemporaryDirectory() as folder:
        environment = pathlib.Path(folder, "environment")
        venv.create(environment, with_pip=True)
        python = environment / "bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, cwd=folder)
        ran = subprocess.run([python, "-c", lines[1]], check=True, cwd=folder, env={}, capture_output=True, text=True)
    strategy, best, mine = ran.stdout.split()
    assert 0 < float(best) <= float(mine), ran.stdout
    print(f"{wheel.name}: {strategy} in {best} s; 1 passed, 0 failed")


if __name__ == "__main__":
    main()
