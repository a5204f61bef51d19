"""How a run ended: the outcome, and the words for it. Pure."""

import signal
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringweave.launch.causes import Death, first_cause

Outcome = Literal["done", "failed", "interrupted"]
NUM_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a run ended."""

    outcome: Outcome
    deaths: tuple[Death, ...]
    """Every worker that ended badly, by rank."""
    interrupts: tuple[signal.Signals, ...]
    """What the run itself was sent."""

    @property
    def exit_code(self) -> int:
        """Exit code of `ringweave run`."""
        return 0 if self.outcome == "done" else 1

    @property
    def cause(self) -> str | None:
        """Why it did not end well, in one line; None if it did."""
        if self.outcome == "interrupted":
            return f"interrupted by {self.interrupts[0].name}"
        first = first_cause(self.deaths)
        return f"rank {first.global_rank} on node {first.node} {first.reason}" if first else None


def conclude(deaths: Sequence[Death], interrupts: Sequence[signal.Signals]) -> Ending:
    """The ending of a run, from what its workers died of and what the run was sent.

    A worker that died by the very signal which interrupted the run got it from the same hand, and is no cause.
    """
    first = first_cause(deaths)
    names = {how.name for how in interrupts}
    if first is not None and first.exit.signal_name not in names:
        outcome: Outcome = "failed"
    else:
        outcome = "interrupted" if interrupts else "done"
    return Ending(outcome=outcome, deaths=tuple(deaths), interrupts=tuple(interrupts))


def to_text(ending: Ending, *, wall_s: float, log_of: str) -> str:
    """The report for a user, first cause on top; empty if all went well.

    Args:
        ending: How the run ended.
        wall_s: How long it took.
        log_of: Path of a log file, with `{rank}` in place of the rank.
    """
    if ending.outcome == "done":
        return ""
    first = first_cause(ending.deaths)
    if ending.outcome == "interrupted" or first is None:
        return f"ringweave: interrupted after {wall_s:.1f} s by {ending.interrupts[0].name}.\n"
    lines = [
        f"ringweave: failed after {wall_s:.1f} s: {ending.cause}.",
        *_hint(first),
        f"Last lines of {log_of.format(rank=first.global_rank)}:",
    ]
    lines += [f"    {line}" for line in first.last_lines[-NUM_LINES:]] or ["    (it printed nothing)"]
    lines += _others(ending.deaths, first)
    return "\n".join(lines) + "\n"


def _hint(first: Death) -> list[str]:
    if first.exit.signal_name == "SIGKILL":
        return ["If nobody killed it, the machine ran out of memory: `dmesg | grep -i oom` tells."]
    if first.exit.signal_name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"):
        return ["It crashed in native code: run with PYTHONFAULTHANDLER=1 to see where."]
    return []


def _others(deaths: Sequence[Death], first: Death) -> list[str]:
    after = [death for death in deaths if death is not first and not death.exit.stopped]
    ended = [str(death.global_rank) for death in deaths if death.exit.stopped]
    lines = [f"After it, rank {death.global_rank} on node {death.node} {_short(death.reason)}." for death in after]
    return lines + ([f"Ended by ringweave: rank {', '.join(ended)}."] if ended else [])


def _short(reason: str) -> str:
    return textwrap.shorten(reason, 160, placeholder=" ...")
