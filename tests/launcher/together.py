"""Many processes that run `ringweave submit` for one name at the same moment; prints a JSON line for each.

    python together.py COUNT PLACE JOB_FILE

They are forked from a process that has everything imported, so that they differ by milliseconds and not by imports.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from ringweave.cli.main import run_command_line


def submit_in(folder: Path, starts: int, argv: list[str]) -> NoReturn:
    """Submit when the pipe ends, and end; what was printed lies in a folder."""
    with contextlib.suppress(BaseException):
        folder.mkdir()
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.read(starts, 1)
        os._exit(run_command_line(argv))
    os._exit(99)


def submit_all(count: int, argv: list[str]) -> None:
    """All at once."""
    starts, gate = os.pipe()
    with tempfile.TemporaryDirectory() as name:
        folders = {}
        for index in range(count):
            folder = Path(name, str(index))
            pid = os.fork()
            if pid == 0:
                os.close(gate)
                submit_in(folder, starts, argv)
            folders[pid] = folder
        os.close(gate)
        for pid, folder in folders.items():
            _, status = os.waitpid(pid, 0)
            told = {stream: (folder / stream).read_text() for stream in ("out", "err")}
            print(json.dumps({"code": os.waitstatus_to_exitcode(status), **told}), flush=True)


if __name__ == "__main__":
    num_submits, place, path = sys.argv[1:]
    submit = ["submit", path, "--on", place, "-y", "--detach"]
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        assert run_command_line([*submit, "--dry-run"]) == 0  # imports all there is to import
    submit_all(int(num_submits), submit)
