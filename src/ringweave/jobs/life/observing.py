"""What a place is seen to hold of one job: its config, its gate, its worker groups."""

import enum
from dataclasses import dataclass


class Phase(enum.StrEnum):
    """What a worker group is doing."""

    PENDING = "Pending"
    """It exists and is not ready: no room yet, image or files on the way, a node that boots."""
    READY = "Ready"
    """It waits at the gate; no worker has started in its round."""
    RUNNING = "Running"
    """Its workers train."""
    INTERRUPTED = "Interrupted"
    """Its workers ended for another node's failure; the group itself lives and can be called back to the gate."""
    SUCCEEDED = "Succeeded"
    """All its workers ended with exit code 0."""
    FAILED = "Failed"
    """It ended otherwise, by itself."""
    STOPPED = "Stopped"
    """It ended because it was told to stop."""

    @property
    def is_alive(self) -> bool:
        """Something of it runs or may yet run."""
        return self in (Phase.PENDING, Phase.READY, Phase.RUNNING, Phase.INTERRUPTED)


class Lack(enum.StrEnum):
    """What a group needs to begin, and has not got."""

    ROOM = "Room"
    """A place to be: it begins when something else ends."""
    MEANS = "Means"
    """What does not come by itself, whatever room there is: an image, a right, a volume."""


class Cause(enum.StrEnum):
    """Why an attempt ended."""

    PROGRAM = "Program"
    """The script ended with an exit code other than 0: the user's error, which trying again does not mend."""
    PLACE = "Place"
    """A signal, a lost node, an image that cannot be had: not the script's doing, so it is tried again."""
    PEER = "Peer"
    """Another node failed, and this one with it."""
    ROUND = "Round"
    """It had finished, and the round has to be run again by all."""
    SUSPENDED = "Suspended"
    """The job was suspended."""
    RETRIED = "Retried"
    """The whole job was tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """A machine that does not answer: whether anything runs there only somebody can know who goes and sees."""

    text: str
    """What shows it; the same as long as it lasts."""
    mend: str
    """What tells the place that nothing runs there any more, as a command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One worker group that is seen: the workers of one node in one attempt."""

    node: int
    """Index of the node in the request."""
    attempt: int
    """From 1; with the node it names the group in its place."""
    round: int
    """The round of the gate that it waits for, or has passed."""
    phase: Phase
    """What it is doing."""
    called: int = 0
    """The round that it was told to gather for last, if the place knows; it may not have heard of it yet."""
    cause: Cause | None = None
    """Why it failed: PROGRAM, PLACE or PEER; None unless it has FAILED. An unknown cause counts as PLACE."""
    exit_code: int | None = None
    """Of the first worker that failed, where there is one."""
    text: str = ""
    """What the place says: why it is pending, or how it ended."""
    lacks: Lack | None = None
    """What a pending one is known to lack; None where it may only be on its way."""
    silence: Silence | None = None
    """Its machine does not answer, as far as the place knows; None where it does, or where the group has ended."""
    ended_s: float | None = None
    """When it ended or was interrupted, on the clock that `reconcile` is given."""
    leaving: bool = False
    """It was told to end or is being removed, by us or by somebody else; False again once it has ended and is kept."""
    iterations: int | None = None
    """Training steps that it has done."""
    last_loss: float | None = None
    """The last loss that it reported."""
    epoch: tuple[int, int] = (0, 0)
    """The newest epoch of the membership of an elastic job (term, number) that is known to it; zeros if none is."""
    members: tuple[str, ...] = ()
    """Its own workers as members of an elastic job, `RANK.LIFE`."""
    out: tuple[str, ...] = ()
    """Members of an elastic job that are none any more in that epoch, and have not finished."""

    @property
    def is_at_gate(self) -> bool:
        """It is ready for its round, or beyond."""
        return not self.leaving and self.phase in (Phase.READY, Phase.RUNNING, Phase.SUCCEEDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Everything of one job that is in its place; read after the record, so that it is never older than it."""

    config: bool = False
    """The config (node names, counts, script) exists."""
    torn: bool = False
    """Of the config a part is missing, which somebody has removed: it has to be made again, before any group."""
    gate: int = 0
    """The gate is open for rounds up to this one; 0 without a config."""
    groups: tuple[Group, ...] = ()
    """All worker groups, also those that are being removed: a group is gone when nothing of it can run any more."""


def cause_of_exit(exit_code: int | None, signal_name: str | None, *, complains_of_peer: bool) -> Cause:
    """Why workers that ended badly did so, by the first one that did.

    Args:
        exit_code: Of the worker; None if a signal ended it. Above 128 a shell means a signal by it.
        signal_name: The signal that ended it, or None.
        complains_of_peer: Its last words blame another rank.
    """
    if complains_of_peer:
        return Cause.PEER
    if signal_name is not None or exit_code is None or exit_code > 128:
        return Cause.PLACE
    return Cause.PROGRAM
