"""Problems of a cluster: the house's problems of files, raised as what outsiders of this room catch."""

from collections.abc import Iterable

from ringweave.errors import ClusterError
from ringweave.files import problems
from ringweave.files.problems import Problem


class ClusterProblemsError(problems.ProblemsError, ClusterError):
    """A ClusterError that still has its problems as data; what outsiders catch is ClusterError."""


def refuse_any(found: Iterable[Problem]) -> None:
    """Raise when there are problems.

    Raises:
        ClusterProblemsError: At least one problem was found.
    """
    problems.refuse_any(found, error=ClusterProblemsError)
