"""Which of several deaths was the first cause. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.launch.launcher import Exit

_TRACEBACK = "Traceback (most recent call last):"
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""torch.distributed puts it before each line of a traceback once there is a process group."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning|Exit|Failure|Group|Timeout|Refused)\b")
_ANY_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::\s|$)")
_OF_A_PEER = re.compile(
    r"""PeerError | BrokenPipe | Broken\ pipe | Connection(?:Reset|Refused|Aborted)
    | [Cc]onnection\ (?:was\ )?(?:closed|reset|refused|aborted) | [Ss]ocket\ (?:closed|[Tt]imeout)
    | [Rr]emote\ process\ exited | ncclRemoteError | got\ 0\ bytes | recvValue\ failed | sendBytes\ failed
    | heart\ ?beat | Timed\ out\ waiting | client\ socket\ has\ (?:failed|timed\ out)""",
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A worker that ended badly, and what it said last."""

    global_rank: int
    node: str
    exit: Exit
    last_lines: tuple[str, ...] = ()
    """End of its log."""

    @property
    def exception(self) -> str | None:
        """The exception that ended it, `ValueError: no such file`, if its log has one."""
        return find_exception(self.last_lines)

    @property
    def reason(self) -> str:
        """What ended it, in words."""
        if self.exit.signal_name:
            return f"was killed by {self.exit.signal_name}"
        return f"raised {self.exception}" if self.exception else f"ended with exit code {self.exit.exit_code}"

    @property
    def blames_a_peer(self) -> bool:
        """By its exception; or, where C++ aborts the process, by anything that it said last."""
        if self.exit.signal_name == "SIGABRT":
            return any(_OF_A_PEER.search(line) for line in self.last_lines)
        return self.exit.signal_name is None and bool(_OF_A_PEER.search(self.exception or ""))


def first_cause(deaths: Sequence[Death]) -> Death | None:
    """The death that most likely brought about the others; None if there is none that we did not bring about.

    A death by a signal comes before one by an exception, as a killed process has no say in it; one that complains of a
    peer comes last, as the peer was there first; then the earliest counts, then the lowest rank.
    """
    own = [death for death in deaths if not death.exit.stopped and not death.exit.is_good]
    return min(own, key=_rank, default=None)


def find_exception(lines: Sequence[str]) -> str | None:
    """The last exception that Python reported in these lines, or None."""
    lines = [_TORCH_PREFIX.sub("", line, count=1) for line in lines]
    starts = [index for index, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
    if starts:
        after = [line for line in lines[starts[-1] + 1 :] if _EXCEPTION.match(line)]
        other = [line for line in lines[starts[-1] + 1 :] if _ANY_EXCEPTION.match(line)]
        return next(iter(after or other), None)
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), None)


def _rank(death: Death) -> tuple[int, float, int]:
    by_itself = 0 if death.exit.signal_name else 1
    return 2 if death.blames_a_peer else by_itself, death.exit.time_s, death.global_rank
