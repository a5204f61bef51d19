"""Input problems as data: each mistake in a file knows its key path, so that a reader can add file and line.

A path uses the words of the dataclasses (`nodes.0.nics.0.rate_bytes_per_s`) until the file reader translates it to the
keys that the author wrote (`nodes.0.nic`).
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ringweave import errors
from ringweave.errors import UsageError

KeyPath = tuple[str | int, ...]

MAX_SHOWN = 3
"""Problems shown in one error, so that it fits on a screen; more appear once these are fixed."""
MAX_COLLECTED = 50
"""A file of 100,000 wrong nodes stops being read after this many problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputProblem:
    """One mistake in an input."""

    path: KeyPath
    """Keys and indices from the top down; empty for the whole input."""
    what: str
    """Subject of the error, such as `switch of node a0`."""
    got: object
    expected: str
    """Allowed values, completing "expected ..."."""
    do: str
    """Fix, one sentence without a full stop."""
    line: int | None = None
    """Line of the file, from 1; None where it follows from the path or where there is no file."""

    def text(self, where: str) -> str:
        """Return the problem in the form of `errors.explain`."""
        return errors.explain(self.what, got=self.got, expected=self.expected, do=self.do, where=where)


class InputError(UsageError):
    """Usage error that keeps its problems as data."""

    def __init__(self, problems: tuple[InputProblem, ...]) -> None:
        super().__init__()
        self.args, self.problems = (problems,), problems

    def __str__(self) -> str:
        """Return the problems, located by key path alone, as for values built in code."""
        return problems_text(self.problems, lambda problem: dotted_path(problem.path))


def raise_problems(problems_found: Iterable[InputProblem], *, error: type[InputError] = InputError) -> None:
    """Raise if there are problems; a generator is read only as far as problems could be shown.

    Raises:
        InputError: At least one problem was found; of the class `error`.
    """
    problems = tuple(problem for problem, _ in zip(problems_found, range(MAX_COLLECTED), strict=False))
    if problems:
        raise error(problems)


def problems_text(problems: tuple[InputProblem, ...], where: Callable[[InputProblem], str]) -> str:
    """Return the text of an error: the first few problems, one per line, and the number of others."""
    lines = [problem.text(where(problem)) for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        at_least = "at least " if len(problems) >= MAX_COLLECTED else ""
        lines.append(f"... and {at_least}{len(problems) - MAX_SHOWN} more, shown once these are mended.")
    return "\n".join(lines)


def dotted_path(path: KeyPath) -> str:
    """Return a key path as text: `nodes.0.nic`; an unusual key is quoted and shortened."""
    return ".".join(str(part) if isinstance(part, int) else _key_text(part) for part in path)


def suggest_closest(value: object, names: Iterable[str]) -> str:
    """Return `Did you mean "uplink"?` with the name closest to the value; empty if no name is close."""
    by_folded = {name.casefold(): name for name in names}
    matches = difflib.get_close_matches(str(value)[:64].casefold(), by_folded, n=1, cutoff=0.6)
    return f'Did you mean "{by_folded[matches[0]]}"?' if matches else ""


def shorten_names(names: Iterable[str], num_total: int) -> str:
    """Return `a0, a1, a2 and 7 more`: enough names to recognise the list."""
    shown = [name for name, _ in zip(names, range(6), strict=False)]
    more = f" and {num_total - len(shown)} more" if num_total > len(shown) else ""
    return ", ".join(shown) + more


def _key_text(key: str) -> str:
    is_plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum() and len(key) <= 40
    return key if is_plain else errors.shorten(key)
