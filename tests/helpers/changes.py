"""Files that have changed since the code was last known to be tested."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

#: A clean clone of the main branch does not say where the work in it began: the commits of so many hours are taken.
HOURS_OF_WORK = 4


def changed_files(root: Path) -> tuple[str, list[str]]:
    """Return the commit before the change and the files that differ from it, those not committed included.

    The commit is ``RNNLENS_BASE`` if that is set. On a branch it is the one where the branch leaves ``origin/main``, or
    ``main``; on the main branch itself, the last one that is at least four hours older than the newest.
    """

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(root), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    head, base = git("rev-parse", "HEAD"), os.environ.get("RNNLENS_BASE", "")
    for branch in ("origin/main", "main"):
        base = base or git("merge-base", "HEAD", branch)
        base = "" if base == head else base
    if not base:
        before = int(git("log", "-1", "--format=%ct")) - 3600 * HOURS_OF_WORK
        base = git("rev-list", "-1", "--first-parent", f"--before={before}", "HEAD")
    base = base or git("rev-list", "--max-parents=0", "HEAD").splitlines()[0]
    files = git("diff", "--name-only", base) + "\n" + git("ls-files", "--others", "--exclude-standard")
    return git("rev-parse", "--short", base), sorted(filter(None, files.splitlines()))
