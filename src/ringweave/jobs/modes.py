"""Training modes: the names that users type, and the mode that `auto` stands for."""

from ringweave.errors import UsageError
from ringweave.files.problems import suggest_closest
from ringweave.jobs.request import ELASTIC_SERVER_MODES, SERVER_MODES
from ringweave.jobs.request import MODES as NAMES

AUTO, SYNC, BALANCED, PS_HRA, PS, LOCAL = NAMES


def check_mode(name: str, where: str = "") -> str:
    """Return `name` if it is a valid mode.

    Raises:
        UsageError: No such mode; the text suggests the nearest one.
    """
    if name in NAMES:
        return name
    fix = suggest_closest(name, NAMES) or "Name one of them"
    raise UsageError("mode", got=name, expected=f"one of {', '.join(NAMES)}", do=fix, where=where)


def has_server(name: str | None, *, is_elastic: bool) -> bool:
    """Return whether a mode has a parameter server."""
    return name in (ELASTIC_SERVER_MODES if is_elastic else SERVER_MODES)


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
