"""Ctrl-C ends a command with one word and code 130, wherever it strikes.

Python turns Ctrl-C into an exception, which goes astray in code that catches everything: a callback of a compiled
program, a destructor, an import. So the strike is remembered, said at once, and final: what unwinds afterwards is not
shown, and a process that has not come to an end by itself after a moment is ended.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # nothing is imported that is not needed to listen
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # the interpreter's own: signal itself loads enum, functools and collections

#: Code of a process that Ctrl-C ended, as shells count.
CODE = 130
#: Seconds that open files have to be put in order.
GRACE_S = 3.0


class Interrupts:
    """Listens to Ctrl-C while a command runs.

    Parameters
    ----------
    whole_process
        Whether the process is the command and nothing else, so that it may be silenced and ended.
    """

    def __init__(self, *, whole_process: bool) -> None:
        self.struck = False
        self._whole_process = whole_process
        self._over = False

    def __enter__(self) -> Interrupts:
        # Where the shell said to ignore Ctrl-C (a job in the background) it stays ignored.
        self._listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            if self._listens:
                signal.signal(signal.SIGINT, self._strike)
        except ValueError:  # only the main thread can listen
            self._listens = False
        return self

    def __exit__(self, *exc: object) -> None:
        if self.struck and self._whole_process:
            os._exit(CODE)
        self._over = True
        if self._listens and not self._whole_process:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self.struck and self._whole_process:
            return
        self.struck = True
        if self._whole_process:
            _say_and_fall_silent()
            if self._over:  # frameworks take their time to end
                os._exit(CODE)
            import threading

            end = threading.Timer(GRACE_S, os._exit, (CODE,))
            end.daemon = True
            end.start()
        raise KeyboardInterrupt


def _say_and_fall_silent() -> None:
    """One word on standard error, and nothing after it; a cursor that a progress bar hid comes back."""
    terminal = os.isatty(2)
    os.write(2, b"\x1b[?25h\r\x1b[31minterrupted\x1b[0m\n" if terminal else b"interrupted\n")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
