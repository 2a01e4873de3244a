"""Stands for ``sglang.launch_server``: its start, its health, and what it says to a probe.

Copied into a package called ``sglang`` by the tests of the launcher. Behaves as ``FAKE`` says.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FAKE = json.loads(os.environ["FAKE_SGLANG"])


def option(name):
    return sys.argv[sys.argv.index(name) + 1]


class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        key = option("--api-key") if "--api-key" in sys.argv else None
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            self.reply(401, {})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": option("--served-model-name")}]})
        else:
            self.reply(200 if time.monotonic() >= READY else 503, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        url = body["messages"][0]["content"][0]["video_url"]["url"]
        if FAKE.get("plugin", True):
            self.reply(400, {"message": f"video 0: '{url}' URLs are not accepted here"})
        else:
            self.reply(400, {"message": "Kimi-K3 supports image input only"})
        if FAKE.get("dies_later"):
            os.kill(os.getpid(), signal.SIGKILL)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    if FAKE.get("dies"):
        sys.exit(3)
    if FAKE.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A scheduler: another process, which must not outlive the launcher.
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(FAKE["pids"]).write_text(f"{os.getpid()} {helper.pid}")
    READY = time.monotonic() + FAKE.get("start", 0.0)
    address = (option("--host"), int(option("--port")))
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()
