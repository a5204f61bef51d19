"""The one tree of errors.

```text
RingweaveError                something ringweave refuses or cannot do       exit code 1
├── UsageError                wrong usage or input of a command              exit code 2
│   ├── ClusterError          a cluster file, or a fact about it, is wrong
│   └── JobError              a job's request, or what is asked of a job, is refused
│       └── UnknownJobError   there is no job of that name, or not any more
├── PlacementError            a rank cannot be put on a node of the cluster
├── ScheduleError             a schedule is malformed or does not compute its collective
├── LaunchError               workers could not be started or stopped
├── LabError                  a cluster could not be brought up on this machine, or taken down
├── TrainingError             training cannot be prepared, or cannot go on, as asked
├── MembershipError           this worker is no member of its job any more, or the job is over
├── CommunicationError        a collective could not be run
│   ├── PeerError             another rank died, vanished or hangs
│   └── DisagreementError     ranks do not run the same thing
└── WireError                 a connection that is not a collective's (server, coordinator, state) failed
    ├── RefusedError          a peer was not let in, or did not let us in
    ├── MessageError          a message breaks the format, a limit, its checksum or its schema
    ├── ConnectionLostError   the connection broke or was closed
    ├── DeadlineError         not done in time
    ├── LeadershipError       a server that has a standby does not lead, or does not any more
    └── RemoteError           the other side took the message and failed
```

A text reads `<what failed>: <value we got>, expected <what is allowed>. <What to do>. [<where>]`.
User errors are printed without a traceback; a traceback always means a bug of ours.
"""

import reprlib


class RingweaveError(Exception):
    """Base of every error that ringweave raises on purpose; `exit_code` is what a command ends with."""

    exit_code = 1


class UsageError(RingweaveError):
    """What the user typed or wrote is not allowed."""

    exit_code = 2


class ClusterError(UsageError):
    """A cluster file, or a value in it, is wrong."""


class JobError(UsageError):
    """A job's request is wrong or refused, or a job cannot do what is asked of it."""


class UnknownJobError(JobError):
    """There is no job of that name in that place, or not any more."""


class PlacementError(RingweaveError):
    """A rank cannot be put on a node of the cluster."""


class ScheduleError(RingweaveError):
    """A schedule is malformed, or does not compute its collective."""


class LaunchError(RingweaveError):
    """Workers could not be started or stopped."""


class LabError(RingweaveError):
    """A cluster could not be brought up on this machine, changed or taken down."""


class TrainingError(RingweaveError):
    """Training cannot be prepared, or cannot go on, as it was asked for."""


class CapacityError(TrainingError):
    """The workers that there are have not enough memory for a batch."""


class MembershipError(RingweaveError, RuntimeError):
    """This worker is no member of its elastic job any more, or the job is over; it must change nothing and end."""

    exit_code = 75  # EX_TEMPFAIL: who starts it again does right


class CommunicationError(RingweaveError, RuntimeError):
    """A collective could not be run. Also a RuntimeError, as torch.distributed's own failures are."""


class PeerError(CommunicationError):
    """Another rank died, vanished or hangs; the text names its rank and node."""


class DisagreementError(CommunicationError):
    """Ranks of one group do not run the same schedule or the same collective."""


class WireError(RingweaveError):
    """A connection of ringweave's own that is not a collective's could not do what was asked."""


class RefusedError(WireError):
    """A peer was not let in, or did not let us in: certificate, token, job, role, or no room."""


class MessageError(WireError):
    """A message breaks the format, a limit, its checksum or its schema."""


class ConnectionLostError(WireError):
    """The connection broke, or was closed; what was under way may or may not have arrived."""


class DeadlineError(WireError):
    """What was asked was not done in the time that it was given."""


class LeadershipError(WireError):
    """A server that has a standby, or is one, does not lead (any more): ask which one does, and say it there."""


class RemoteError(WireError):
    """The other side took the message, and its handler failed; the text is the handler's."""

    def __init__(self, text: str, error: str = "") -> None:
        super().__init__(text)
        self.error = error
        """Name of the error's class on the other side, for callers that tell failures apart."""


def explain(what: str, *, got: object, expected: str, do: str, where: str = "") -> str:
    """Compose the text of an error in the house's form.

    Args:
        what: What failed, without a full stop: `nic rate of node a0`.
        got: The offending value, shown as Python would show it, but never at more than about a line's length.
        expected: What is allowed, completing "expected ...".
        do: What to do about it; a full stop is added unless it ends in a question mark.
        where: File and key, or rank and step; empty where there is none.

    Returns:
        `<what>: <got>, expected <expected>. <do>. [<where>]`
    """
    stop = "" if do.endswith(("?", ".")) else "."
    place = f" [{where}]" if where else ""
    return f"{what}: {shorten(got)}, expected {expected}. {do}{stop}{place}"


def shorten(got: object) -> str:
    """The value as Python shows it, on one line and with the middle of anything long left out."""
    return _ONE_LINE.repr(got)


class _OneLine(reprlib.Repr):
    """A `repr` of bounded length for the values that strangers hand us."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 4
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of some thousands of digits.
        return super().repr_int(x, level) if x.bit_length() < 256 else f"<an integer of {x.bit_length()} bits>"

    def repr_instance(self, x: object, level: int) -> str:
        return " ".join(super().repr_instance(x, level).split())


_ONE_LINE = _OneLine()
