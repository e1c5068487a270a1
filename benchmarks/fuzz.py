"""Generated calls against a server of its own, with a token, on a database of FAKE rows: every check of schemathesis.

What a schema cannot say (a parameter under two names, a heads_kv that does not divide heads) is refused by name, so the
one check that takes every valid-looking call for an acceptable one is left out.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

TOKEN = "fake-token"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        database = Path(folder) / "fuzz.db"
        environment = {**os.environ, "DASH_TOKEN": TOKEN, "PYTHONPATH": "."}
        command = [sys.executable, "-m", "server.cli", "--port", str(port), "--db", str(database)]
        server = subprocess.Popen(command, env=environment)
        address = f"http://127.0.0.1:{port}"
        try:
            wait(f"{address}/healthz")
            return fuzz(address, options.examples, options.seed, folder)
        finally:
            server.terminate()
            server.wait(30)


def wait(address: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(address, timeout=10).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def fuzz(address: str, examples: int, seed: int, folder: str) -> int:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json"),
        *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(examples)),
        *("--header", f"Authorization: Bearer {TOKEN}", "--seed", str(seed)),
        *("--exclude-path-regex", "^/v1/"),  # the same calls again
    ]
    return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
