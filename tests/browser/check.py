"""Opens a report in headless Chromium, reads the verdict, sorts the table, hovers the Gantt, and
asserts that the console is clean and that nothing was requested. Standard library only: it speaks
WebDriver over HTTP."""

import base64
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request


class Driver:
    """A WebDriver session."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            ["chromedriver", f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.profile = tempfile.mkdtemp()
        self.session = ""
        for attempt in range(100):
            try:
                if self.call("GET", "/status")["ready"]:
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        options = {
            "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={self.profile}", "--window-size=1280,1600",
            ]
        }
        capabilities = {
            "alwaysMatch": {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
        }
        made = self.call("POST", "/session", {"capabilities": capabilities})
        self.session = f"/session/{made['sessionId']}"

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script, *args):
        return self.call("POST", f"{self.session}/execute/sync", {"script": script, "args": list(args)})

    def move(self, x, y):
        pointer = {
            "type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"},
            "actions": [
                {"type": "pointerMove", "duration": 0, "x": int(x) - 2, "y": int(y)},
                {"type": "pointerMove", "duration": 50, "x": int(x), "y": int(y)},
            ],
        }
        self.call("POST", f"{self.session}/actions", {"actions": [pointer]})

    def close(self):
        try:
            self.call("DELETE", self.session)
        finally:
            self.process.terminate()
            shutil.rmtree(self.profile, ignore_errors=True)


def check(driver, report):
    driver.call("POST", f"{driver.session}/url", {"url": report.resolve().as_uri()})
    verdict = driver.run("return document.getElementById('verdict').innerText")
    if not driver.run("return document.getElementById('alternatives') !== null"):
        # A comparison, or the page of a search in which nothing fits: text and tables alone.
        fits_everywhere(driver, report, bars=False)
        quiet(driver)
        return verdict, "-"
    assert "FIT" in verdict.upper() and "GiB" in verdict, f"verdict: {verdict!r}"

    column = """
        const table = document.getElementById('alternatives');
        return [...table.tBodies[0].rows].map(row => row.cells[arguments[0]].textContent);"""
    heads = driver.run("return [...document.querySelectorAll('#alternatives th')].map(h => h.textContent)")
    memory = next(i for i, head in enumerate(heads) if "memory" in head.lower())
    click = """
        const head = document.querySelectorAll('#alternatives th')[arguments[0]];
        (head.querySelector('button') || head).click();
        return head.getAttribute('aria-sort');"""
    assert driver.run(click, memory) in ("ascending", "descending"), "sorting is not announced"
    first = [float(cell.split()[0].replace(",", "")) for cell in driver.run(column, memory)]
    driver.run(click, memory)
    second = [float(cell.split()[0].replace(",", "")) for cell in driver.run(column, memory)]
    assert first in (sorted(first), sorted(first, reverse=True)), f"not sorted: {first}"
    assert sorted(first) == sorted(second) and (len(set(first)) < 2 or first != second), "one order only"

    box = driver.run("""
        const gantt = document.getElementById('gantt-canvas');
        gantt.scrollIntoView({block: 'center'});
        const box = gantt.getBoundingClientRect();
        return [box.left, box.top, box.width, box.height];""")
    seen = ""
    for share in (0.3, 0.4, 0.5, 0.6, 0.7):
        for down in (0.15, 0.3, 0.5):
            driver.move(box[0] + box[2] * share, box[1] + box[3] * down)
            seen = driver.run("const t = document.getElementById('tip'); return t && !t.hidden ? t.textContent : ''")
            if seen:
                break
        if seen:
            break
    assert "ms" in seen or "s" in seen, "hovering the Gantt shows nothing"

    fits_everywhere(driver, report, bars=True)
    quiet(driver)
    return verdict, seen


def quiet(driver):
    """Nothing was requested, and the console is clean."""
    requests = driver.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert not [r for r in requests if not r.startswith(("data:", "blob:"))], f"requests: {requests}"
    log = driver.call("POST", f"{driver.session}/se/log", {"type": "browser"})
    errors = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
    assert not errors, f"console: {errors}"


def fits_everywhere(driver, report, bars):
    """Nothing is wider than the screen on a phone, a tablet, a laptop and a wide screen, in the light and in the dark; on
    paper bars and headers are there, and what is folded is open."""

    def devtools(command, **parameters):
        return driver.call("POST", f"{driver.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    page = report.resolve().as_uri()
    for width in (360, 768, 1440, 2560):
        for scheme in ("light", "dark"):
            devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            driver.call("POST", f"{driver.session}/url", {"url": page})
            wide = driver.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], f"{wide[0]} pixels on a screen of {width}"
    devtools("Emulation.setEmulatedMedia", media="print", features=[])
    paper = driver.run("""
        const shown = (what) => [...document.querySelectorAll(what)].filter(
            (part) => part.getBoundingClientRect().height > 0 && getComputedStyle(part).display !== 'none').length;
        dispatchEvent(new Event('beforeprint'));
        const folded = document.querySelectorAll('details:not([open])').length;
        dispatchEvent(new Event('afterprint'));
        return {bars: shown('.track i'), exact: getComputedStyle(document.body).printColorAdjust,
                heads: shown('#alternatives th button'), folded, copies: shown('[data-copy]')};""")
    assert paper["exact"] == "exact" and paper["folded"] == 0 and paper["copies"] == 0, f"on paper: {paper}"
    assert not bars or (paper["bars"] > 4 and paper["heads"] > 4), f"bars and headers on paper: {paper}"
    devtools("Emulation.setEmulatedMedia", media="", features=[])
    devtools("Emulation.clearDeviceMetricsOverride")
    driver.call("POST", f"{driver.session}/url", {"url": page})


def main():
    report = pathlib.Path(sys.argv[1])
    driver = Driver()
    try:
        verdict, seen = check(driver, report)
        picture = report.with_suffix(".png")
        driver.run("window.scrollTo(0, 0)")
        shot = driver.call("GET", f"{driver.session}/screenshot")
        picture.write_bytes(base64.b64decode(shot))
    finally:
        driver.close()
    print(f"{report.name}: {verdict.splitlines()[0]}; hover: {seen.splitlines()[0]}; 1 passed, 0 failed")


if __name__ == "__main__":
    main()
