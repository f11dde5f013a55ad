"""Handling of Ctrl-C: a command ends with the word "interrupted" and exit code 130.

Python turns Ctrl-C into an exception, which is lost in code that catches all exceptions: a callback of a compiled
program, a destructor, an import. So the handler stores that Ctrl-C was pressed and prints it at once; later output on
standard error is discarded, and a process that has not ended after a grace period is ended.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # imports are kept to the minimum, so that the handler is set early
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # the built-in module: signal itself imports enum, functools and collections

#: Exit code of a process ended by Ctrl-C, as in shells.
CODE = 130
#: Seconds after Ctrl-C in which open files can be closed.
GRACE_S = 3.0


class Interrupts:
    """Handler of Ctrl-C while a command runs; if it is the ``whole_process``, that may be silenced and ended."""

    def __init__(self, *, whole_process: bool) -> None:
        self.was_pressed = False
        self._whole_process = whole_process
        self._has_exited = False

    def __enter__(self) -> Interrupts:
        # If the shell set Ctrl-C to be ignored (a background job), it stays ignored.
        self._handles_sigint = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            if self._handles_sigint:
                signal.signal(signal.SIGINT, self._handle_ctrl_c)
        except ValueError:  # only the main thread can set a handler
            self._handles_sigint = False
        return self

    def __exit__(self, *exc: object) -> None:
        if self.was_pressed and self._whole_process:
            os._exit(CODE)
        self._has_exited = True
        if self._handles_sigint and not self._whole_process:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        if self.was_pressed and self._whole_process:
            return
        self.was_pressed = True
        if self._whole_process:
            _print_and_silence()
            if self._has_exited:  # frameworks may take long to shut down
                os._exit(CODE)
            import threading

            timer = threading.Timer(GRACE_S, os._exit, (CODE,))
            timer.daemon = True
            timer.start()
        raise KeyboardInterrupt


def _print_and_silence() -> None:
    """Print "interrupted" on standard error, show the cursor again, and discard all later output to standard error."""
    is_terminal = os.isatty(2)
    os.write(2, b"\x1b[?25h\r\x1b[31minterrupted\x1b[0m\n" if is_terminal else b"interrupted\n")
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    os.close(devnull)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
