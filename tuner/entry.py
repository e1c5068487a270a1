"""The program ``dash-tune``: imports nothing slow before Ctrl-C is looked after.

Until the commands are imported nothing has begun, so Ctrl-C ends the process there and then: raised inside a module that
is half imported, KeyboardInterrupt would print a traceback or be taken for a failed import.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """``tuner.cli.main``, quiet on Ctrl-C from the first moment on; exit code 130."""
    usual = signal.getsignal(signal.SIGINT)
    try:
        if usual is signal.default_int_handler:  # not where it is ignored, as with nohup
            signal.signal(signal.SIGINT, _leave)
        from tuner import cli, command  # noqa: F401  (the slow part)

        signal.signal(signal.SIGINT, usual)
        cli.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)
