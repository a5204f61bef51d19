"""How workers train together: the names that users type, and which of them `auto` means."""

from ringweave.errors import UsageError, explain
from ringweave.files.problems import closest
from ringweave.jobs.requests.request import MODES as NAMES

AUTO, SYNC, BALANCED, PS_HRA, PS = NAMES
SERVED = (PS_HRA, PS)
"""Those with a parameter server."""


def check_name(name: str, where: str = "") -> str:
    """`name` itself if it can be asked for.

    Raises:
        UsageError: No such mode; the text suggests the nearest one.
    """
    if name in NAMES:
        return name
    mend = closest(name, NAMES) or "Name one of them"
    raise UsageError(explain("mode", got=name, expected=f"one of {', '.join(NAMES)}", do=mend, where=where))


def is_open(asked: str, told: str | None, world_size: int) -> bool:
    """Whether neither script nor launcher names a mode, and there is something to choose."""
    return asked == AUTO and (told or AUTO) == AUTO and world_size > 1


def decide(asked: str, told: str | None, world_size: int) -> tuple[str, str]:
    """The mode that is used, and why in words.

    Args:
        asked: The argument of `prepare`; any name but `auto` decides.
        told: What the launcher was told (`--mode`); decides where the script leaves it open.
        world_size: Number of workers.

    Raises:
        UsageError: One of them is no mode.
    """
    for name, source in ((asked, "the script asks for it"), (told or AUTO, "ringweave run --mode asks for it")):
        if check_name(name) != AUTO:
            return name, source
    if world_size == 1:
        return SYNC, "there is one worker, and nobody to share with"
    return BALANCED, "it is sync while all workers are equally fast, and the faster of the two when they are not"
