"""Training modes: the names that users type, and the mode that `auto` stands for."""

from ringweave.errors import UsageError, explain
from ringweave.files.problems import suggest_closest
from ringweave.jobs.request import ELASTIC_MODE_DO, ELASTIC_MODE_RULE
from ringweave.jobs.request import MODES as NAMES

AUTO, SYNC, BALANCED, PS_HRA, PS, LOCAL = NAMES
SERVER_MODES = (PS_HRA, PS)
"""Modes with a parameter server."""


def check_mode(name: str, where: str = "") -> str:
    """Return `name` if it is a valid mode.

    Raises:
        UsageError: No such mode; the text suggests the nearest one.
    """
    if name in NAMES:
        return name
    fix = suggest_closest(name, NAMES) or "Name one of them"
    raise UsageError(explain("mode", got=name, expected=f"one of {', '.join(NAMES)}", do=fix, where=where))


def check_elastic_mode(name: str | None, where: str = "") -> None:
    """Refuse a mode whose set of workers is fixed.

    Raises:
        UsageError: It is `local`.
    """
    if name == LOCAL:
        what = "mode of an elastic job"
        raise UsageError(explain(what, got=name, expected=ELASTIC_MODE_RULE, do=ELASTIC_MODE_DO, where=where))


def is_undecided(requested: str, launcher_mode: str | None, world_size: int) -> bool:
    """Return True if neither script nor launcher names a mode, and there is a choice."""
    return requested == AUTO and (launcher_mode or AUTO) == AUTO and world_size > 1


def decide_mode(requested: str, launcher_mode: str | None, world_size: int) -> tuple[str, str]:
    """Return the mode to use, and the reason in words.

    Args:
        requested: Argument of `prepare`; any name but `auto` decides.
        launcher_mode: The launcher's `--mode`; decides if the script leaves it open.
        world_size: Number of workers.

    Raises:
        UsageError: One of them is no mode.
    """
    for name, source in (
        (requested, "the script asks for it"),
        (launcher_mode or AUTO, "--mode or RINGWEAVE_MODE asks for it"),
    ):
        if check_mode(name) != AUTO:
            return name, source
    if world_size == 1:
        return SYNC, "there is only one worker"
    return BALANCED, "it is sync while all workers are equally fast, and the faster of the two when they are not"
