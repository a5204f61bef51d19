"""In what a comparison falls short by what was asked for, or by the state of the code: notes for its document. Pure."""

from collections.abc import Iterable

from ringweave.benchmarks.requests import Request

LEAST_ROUNDS = 9
"""Medians and ranges of fewer rounds depend on what else the machine did."""
_DIRTY = "-dirty"


def confess(request: Request, known_systems: Iterable[str], git_commit: str | None) -> list[str]:
    """One sentence for each shortcoming; none where there is none."""
    notes = []
    missing = [name for name in known_systems if name not in request.systems]
    if missing:
        notes.append(f"not asked for, so not measured: {', '.join(missing)}")
    if request.num_rounds < LEAST_ROUNDS:
        notes.append(
            f"{request.num_rounds} rounds were asked for, fewer than the {LEAST_ROUNDS} of a result to rely on"
        )
    if git_commit is not None and git_commit.endswith(_DIRTY):
        notes.append(f"tracked files other than results differ from the commit ({git_commit})")
    return notes
