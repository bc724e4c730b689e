"""The tour in docs/python.md: its blocks run as written, and print what it shows, numbers apart. The loop of
python/README.md trains as written.

`python test_tour.py --write` writes what they print into the page."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PAGE = pathlib.Path(__file__).parents[2] / "docs/python.md"
# A block of code, with the output that may follow it.
BLOCK = re.compile(r"```(python|sh)(?: file=(\S+))?\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.S)


def run(page):
    """Runs the blocks in a folder of their own; yields each with what it printed."""
    session = {}
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.chdir(folder)
        stack.callback(os.chdir, here)
        for block in BLOCK.finditer(page):
            language, file, code, _ = block.groups()
            printed = io.StringIO()
            if file:
                pathlib.Path(file).write_text(code, encoding="utf-8")
            elif language == "python":
                with contextlib.redirect_stdout(printed):
                    exec(compile(code, str(PAGE), "exec"), session)
            else:
                # torchrun of this interpreter, on a port that others leave alone.
                torchrun = f"{sys.executable} -m torch.distributed.run --master-port {os.environ.get('PORT', '29533')}"
                subprocess.run(code.replace("torchrun", torchrun), shell=True, check=True)
            yield block, printed.getvalue().rstrip()


def words(text):
    """Text without its numbers, identifiers and layout, which depend on what was fitted."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f.]*|\s+", " ", text).split()


class Tour(unittest.TestCase):
    def test_blocks_print_what_is_shown(self):
        for block, printed in run(PAGE.read_text(encoding="utf-8")):
            hint = f"after\n{block[3]}it printed\n{printed}\n(test_tour.py --write puts this into the page)"
            self.assertEqual(words(block[4] or ""), words(printed), hint)


class Readme(unittest.TestCase):
    def test_its_loop_trains_over_four_processes(self):
        page = (PAGE.parents[1] / "python/README.md").read_text(encoding="utf-8")
        (code,) = [block[3] for block in BLOCK.finditer(page) if "parallelize(plan, model" in block[3]]
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "train.py").write_text(code, encoding="utf-8")
            port = os.environ.get("PORT", "29533")
            words = [sys.executable, "-m", "torch.distributed.run", "--master-port", port, "--nproc-per-node", "4", "train.py"]
            said = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout
        losses = re.findall(r"step (\d) loss ([\d.]+)", said)
        self.assertEqual(len(losses), 5 * 4)
        # Every rank has the loss of the whole batch, and it falls.
        by_step = [{loss for at, loss in losses if int(at) == step} for step in range(5)]
        self.assertTrue(all(len(alike) == 1 for alike in by_step), losses)
        self.assertLess(float(*by_step[-1]), float(*by_step[0]))


def write():
    """Puts what blocks print into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for block, printed in reversed(list(run(page))):
        language, file, code, _ = block.groups()
        shown = f"\n```text\n{printed}\n```\n" if printed else ""
        head = f"{language} file={file}" if file else language
        page = f"{page[: block.start()]}```{head}\n{code}```\n{shown}{page[block.end() :]}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write() if "--write" in sys.argv else unittest.main()
