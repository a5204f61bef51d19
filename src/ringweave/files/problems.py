"""What is wrong with a file's content, as data: a problem knows where it is, so that a reader can add file and line.

A problem's path is in the words of the dataclasses (`nodes.0.nics.0.rate_bytes_per_s`) until a reader of files
translates it to the keys that its author wrote (`nodes.0.nic`).
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ringweave import errors
from ringweave.errors import UsageError

Path = tuple[str | int, ...]

MAX_SHOWN = 3
"""Problems in one error; more would not fit on a screen, and are shown once these are mended."""
MAX_COLLECTED = 50
"""A file of 100,000 wrong nodes stops being read after this many problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One mistake: where it is, what was found there, what is allowed, what to do."""

    path: Path
    """Keys and indices from the top down; empty for the whole."""
    what: str
    """What failed, such as `switch of node a0`."""
    got: object
    """The value found."""
    expected: str
    """What is allowed, completing "expected ..."."""
    do: str
    """What to do about it, one sentence without a full stop."""
    line: int | None = None
    """Line of the file, from 1; None where it follows from the path or where there is no file."""

    def text(self, where: str) -> str:
        """The problem in the house's form."""
        return errors.explain(self.what, got=self.got, expected=self.expected, do=self.do, where=where)


class ProblemsError(UsageError):
    """A usage error that still has its problems as data."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        """The problems placed by their paths alone, as for what is built in code."""
        return screenful(self.problems, lambda problem: dotted(problem.path))


def refuse_any(found: Iterable[Problem], *, error: type[ProblemsError] = ProblemsError) -> None:
    """Raise when there are problems; takes no more of them from a generator than could ever be shown.

    Raises:
        ProblemsError: At least one problem was found; `error` says of which kind it is.
    """
    problems = tuple(problem for problem, _ in zip(found, range(MAX_COLLECTED), strict=False))
    if problems:
        raise error(problems)


def screenful(problems: tuple[Problem, ...], where: Callable[[Problem], str]) -> str:
    """The text of an error: the first few problems, one a line, and how many are left."""
    lines = [problem.text(where(problem)) for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        at_least = "at least " if len(problems) >= MAX_COLLECTED else ""
        lines.append(f"... and {at_least}{len(problems) - MAX_SHOWN} more, shown once these are mended.")
    return "\n".join(lines)


def dotted(path: Path) -> str:
    """`nodes.0.nic`; a key that nobody expects is quoted and shortened."""
    return ".".join(str(part) if isinstance(part, int) else _plain(part) for part in path)


def closest(value: object, names: Iterable[str]) -> str:
    """`Did you mean "uplink"?` for the name that is most like the value; empty where none is like it."""
    by_folded = {name.casefold(): name for name in names}
    matches = difflib.get_close_matches(str(value)[:64].casefold(), by_folded, n=1, cutoff=0.6)
    return f'Did you mean "{by_folded[matches[0]]}"?' if matches else ""


def listed(names: Iterable[str], num_total: int) -> str:
    """`a0, a1, a2 and 7 more`: enough of the names to recognise it by."""
    shown = [name for name, _ in zip(names, range(6), strict=False)]
    more = f" and {num_total - len(shown)} more" if num_total > len(shown) else ""
    return ", ".join(shown) + more


def _plain(key: str) -> str:
    is_plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum() and len(key) <= 40
    return key if is_plain else errors.shorten(key)
