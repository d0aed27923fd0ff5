"""The entry point of `flowrt` and `python -m flowrt`: runs the command line (flowrt/cli/app.py).

Its imports take some 0.3 s. A Ctrl-C meanwhile ends the process with one line, as it does later.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

from flowrt.exit_codes import INTERRUPTED


def main() -> None:
    if is_default := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would hide the exit statuses of the workers
    from flowrt.cli.app import main as run_command

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """A KeyboardInterrupt inside an import may be swallowed, or turned into another error."""
    os.write(2, b"flowrt: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
