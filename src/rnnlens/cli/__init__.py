"""The command line: ``rnnlens layers``, ``trace``, ``diagnose``, ``report``, ``show``, ``tail``, ``demo``.

Exit codes: 0 for success, 1 for an unexpected error, 2 for wrong arguments, input that rnnlens refuses and errors of
the model or its loss on the data, 3 for a finding named by ``diagnose --fail-on``, 130 for Ctrl-C. A traceback is
shown with ``--debug`` only.
"""

from __future__ import annotations

# Ctrl-C gives a traceback until `main` handles it, so no slow module is imported before.
from .interrupts import CODE as INTERRUPTED
from .interrupts import Interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of its exit codes.

    Parameters
    ----------
    arguments
        Arguments as in a shell, without the program's name. None takes those of the process, which is then ended after
        Ctrl-C even if code catches KeyboardInterrupt.
    """
    try:
        with Interrupts(whole_process=arguments is None) as interrupts:
            from .app import run

            code = run(arguments)
            if interrupts.was_pressed or code == INTERRUPTED:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        from .console import print_error

        code = INTERRUPTED
        print_error("interrupted")
    raise SystemExit(code)
