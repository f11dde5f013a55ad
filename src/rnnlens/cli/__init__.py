"""The command line: ``rnnlens layers``, ``trace``, ``diagnose``, ``report``, ``show``, ``tail``, ``demo``.

Exit codes: 0 for success, 1 for an unexpected error, 2 for wrong arguments and for input that rnnlens refuses, 3 for a
finding named by ``diagnose --fail-on``, 130 for Ctrl-C. A traceback is shown with ``--debug`` only.
"""

from __future__ import annotations

# Ctrl-C gives a traceback until `main` handles it, so no slow module is imported before.
from .interrupts import CODE as INTERRUPTED
from .interrupts import Interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO


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
            import sys

            given = list(sys.argv[1:] if arguments is None else arguments)
            code = _run([word for word in given if word != "--debug"], debug="--debug" in given)
            if interrupts.struck or code == INTERRUPTED:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        code = INTERRUPTED
        _print("interrupted")
    raise SystemExit(code)


def _run(arguments: list[str], *, debug: bool) -> int:
    """Run one command; return its exit code."""
    try:
        import warnings

        from ..errors import RnnlensError, message
        from .app import app, check_folder

        check_folder()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app(args=arguments, prog_name="rnnlens")
        return 0
    except SystemExit as ended:
        return 0 if ended.code is None else ended.code if isinstance(ended.code, int) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if debug:
            _print_traceback()
        if isinstance(error, RnnlensError):
            _print(str(error))
            return 2
        got = f"{type(error).__name__}: {error}"
        _print(message("This went wrong in a way that nobody foresaw.", got=got, hint="--debug shows where"))
        return 1


def _print(text: str) -> None:
    from .console import print_error

    print_error(text)


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one yellow line, without its place in the code of rnnlens."""
    from .console import print_warning

    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | ResourceWarning):
        print_warning(str(message))
