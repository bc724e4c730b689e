"""A WebDriver session with headless Chromium. Standard library only: it speaks to chromedriver over HTTP."""

import base64
import json
import shutil
import socket
import subprocess
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

    def go(self, address):
        self.call("POST", f"{self.session}/url", {"url": address})

    def devtools(self, command, **parameters):
        return self.call("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def shoot(self, path):
        """Writes what is on the screen as a PNG."""
        path.write_bytes(base64.b64decode(self.call("GET", f"{self.session}/screenshot")))

    def errors(self):
        """What the console says went wrong since it was last asked."""
        log = self.call("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

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
