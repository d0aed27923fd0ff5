"""The entry point of `flowrt` and `python -m flowrt`: runs the command line (flowrt/cli/app.py).

Its imports take some 0.3 s. A signal that ends a command ends the process meanwhile with one line, as it does later. The kernel drops
such a signal for process 1 of a container unless there is a handler for it, so handlers come first.
"""

import signal
import sys

from flowrt.system.interrupt import end_at_once

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


def main() -> None:
    numbers = [number for name in _ENDING if (number := getattr(signal, name, None)) is not None and _is_default(number)]
    for number in numbers:
        signal.signal(number, end_at_once)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would hide the exit statuses of the workers
    try:
        from flowrt.cli.app import main as run_command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("flowrt"):
            raise
        # A Python that is started without its path and name takes those of the first one on PATH.
        sys.exit(f"flowrt: error: {sys.executable} has no module {error.name}; run the Python that flowrt was installed for, or install it")

    for number in numbers:
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    run_command()


def _is_default(number: int) -> bool:
    """Neither ignored, as SIGHUP under nohup, nor with a handler of the program that calls `main`."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


if __name__ == "__main__":
    main()
