"""Runs a judgement in a process of its own: parsers keep what they read in the process, and may end it."""

import contextlib
import json
import os
import pathlib
import sys
import traceback


def apart(judge):
    """Nothing if `judge` returns, else why it does not: the text that it exits with, or its exception and place."""
    answer, child = os.pipe()
    if os.fork() == 0:
        error = None
        with contextlib.redirect_stdout(sys.stderr):
            try:
                judge()
            except SystemExit as ended:
                error = f"it exits with code {ended.code}" if isinstance(ended.code, int) else str(ended.code)
            except BaseException as raised:  # noqa: BLE001
                place = traceback.extract_tb(raised.__traceback__)[-1]
                error = f"{type(raised).__name__}: {raised} ({pathlib.Path(place.filename).name}:{place.lineno})"
        os.write(child, json.dumps(error[:400] if error else error).encode())
        os._exit(0)
    os.close(child)
    said = b""
    while part := os.read(answer, 65536):
        said += part
    os.close(answer)
    os.wait()
    return json.loads(said or b'"the process died"')
