"""Files that a command writes for people: refused before the work where that can be known, and never a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringweave.errors import UsageError, explain


def check(option: str, path: str | Path | None) -> None:
    """Refuse before the work a file that could not be written after it; what is in the file stays as it is.

    Args:
        option: What the user gave it by, such as `--out`.
        path: The file; None is none, which is fine.

    Raises:
        UsageError: It cannot be opened for writing.
    """
    if path is None:
        return
    is_new = not Path(path).exists()
    with refusing(option, path):
        with Path(path).open("ab"):
            pass
        if is_new:
            Path(path).unlink()


def write(option: str, path: str | Path, text: str) -> None:
    """Write a text to the file that an option names.

    Raises:
        UsageError: It cannot be written.
    """
    with refusing(option, path):
        Path(path).write_text(text, encoding="utf-8")


@contextmanager
def refusing(option: str, path: str | Path) -> Iterator[None]:
    """Turns what the system says against a file into an error that names the option.

    Raises:
        UsageError: The block raised an OSError.
    """
    try:
        yield
    except OSError as cause:
        do = cause.strerror or str(cause)
        raise UsageError(explain(option, got=str(path), expected="a file that can be written", do=do)) from cause
