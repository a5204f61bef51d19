"""The one tree of errors.

```text
RingweaveError                something that ringweave refuses or cannot do  exit code 1
├── UsageError                wrong usage or input of a command              exit code 2
│   ├── ClusterError          a cluster file, or a value in it, is wrong
│   └── JobError              a job's request, or an action on a job, is refused
│       └── UnknownJobError   there is no job of that name, or not any more
├── PlacementError            a rank cannot be put on a node of the cluster
├── ScheduleError             a schedule is malformed or does not compute its collective
├── LaunchError               workers could not be started or stopped
├── LabError                  a cluster could not be brought up on this machine, or taken down
├── TrainingError             training cannot be prepared or continued as configured
│   └── ExpiredGrantError     a ring's push comes after the other rings have ended the epoch without it
├── MembershipError           this worker is not a member of its job any more, or the job is over
├── CommunicationError        a collective could not be run
│   ├── PeerError             another rank died, vanished or hangs
│   └── DisagreementError     ranks do not run the same schedule or collective
└── RpcError                  a connection of RPC (server, coordinator, state) failed
    ├── RefusedError          a peer was not let in, or did not let us in
    ├── MessageError          a message violates the format, a limit, its checksum or its schema
    ├── ConnectionLostError   the connection broke or was closed
    ├── DeadlineError         not done in time
    ├── NotLeaderError        a server that has a standby does not lead, or does not any more
    └── RemoteError           the other side received the message and failed
```

A text reads `<what failed>: <value we got>, expected <what is allowed>. <What to do>. [<where>]`.
User errors are printed without a traceback; a traceback always means a bug of ours. What the operating system or a
database refuses becomes one of these errors in one place, `from_system`, at the end of a command.
"""

import errno
import os
import reprlib
import traceback
from pathlib import Path


class RingweaveError(Exception):
    """Base of every error that ringweave raises on purpose; a command that fails with it ends with `exit_code`.

    It has a text, or the parts that `explain` puts together: `UsageError("--bytes", got="x", expected=..., do=...)`.
    """

    exit_code = 1

    def __init__(
        self, what: str = "", *, got: object = None, expected: str = "", do: str = "", where: str = ""
    ) -> None:
        super().__init__(explain(what, got=got, expected=expected, do=do, where=where) if expected else what)


class UsageError(RingweaveError):
    """A command's arguments or input are not allowed."""

    exit_code = 2


class ClusterError(UsageError):
    """A cluster file, or a value in it, is wrong."""


class JobError(UsageError):
    """A job's request is wrong or refused, or a job cannot do the requested action."""


class UnknownJobError(JobError):
    """There is no job of that name on that platform, or not any more."""


class PlacementError(RingweaveError):
    """A rank cannot be put on a node of the cluster."""


class ScheduleError(RingweaveError):
    """A schedule is malformed, or does not compute its collective."""


class LaunchError(RingweaveError):
    """Workers could not be started or stopped."""


class LabError(RingweaveError):
    """A cluster could not be brought up on this machine, changed or taken down."""


class TrainingError(RingweaveError):
    """Training cannot be prepared or continued as configured."""


class ExpiredGrantError(TrainingError):
    """A ring pushes what no grant allows any more: the other rings have ended the epoch without it."""


class CapacityError(TrainingError):
    """The present workers have not enough memory for a batch."""


class MembershipError(RingweaveError, RuntimeError):
    """This worker is not a member of its elastic job any more, or the job is over; it must change nothing and exit."""

    exit_code = 75  # EX_TEMPFAIL: it may be started again


class CommunicationError(RingweaveError, RuntimeError):
    """A collective could not be run. Also a RuntimeError, as torch.distributed's own failures are."""


class PeerError(CommunicationError):
    """Another rank died, vanished or hangs; the text names its rank and node."""


class DisagreementError(CommunicationError):
    """Ranks of one group do not run the same schedule or collective, or a message is not what was agreed."""

    culprits: tuple[int, ...] = ()
    """Group ranks that differ from the majority of their group; empty if there is none, or if they are not known."""


class RpcError(RingweaveError):
    """An RPC connection could not do what was requested."""


class RefusedError(RpcError):
    """A peer was not let in, or did not let us in: certificate, token, job, role, or no room."""


class MessageError(RpcError):
    """A message violates the format, a limit, its checksum or its schema."""


class ConnectionLostError(RpcError):
    """The connection broke or was closed; messages under way may or may not have arrived."""


class DeadlineError(RpcError):
    """A request was not answered within its deadline."""


class NotLeaderError(RpcError):
    """A server that has a standby, or is one, does not lead (any more): find the leader and repeat the request."""


class RemoteError(RpcError):
    """The other side received the message, and its handler failed; the text is the handler's."""

    def __init__(self, text: str, error: str = "") -> None:
        super().__init__(text)
        self.error = error
        """Name of the error's class on the other side, so that callers can distinguish failures."""


def explain(what: str, *, got: object, expected: str, do: str, where: str = "") -> str:
    """Compose the text of an error.

    Args:
        what: Subject that failed, without a full stop: `nic rate of node a0`.
        got: The offending value, shown as Python would show it, but never longer than about a line.
        expected: Allowed values, completing "expected ...".
        do: Fix; a full stop is added unless it ends in a question mark.
        where: File and key, or rank and step; empty if there is none.

    Returns:
        `<what>: <got>, expected <expected>. <do>. [<where>]`
    """
    stop = "" if do.endswith(("?", ".")) else "."
    place = f" [{where}]" if where else ""
    return f"{what}: {shorten(got)}, expected {expected}. {do}{stop}{place}"


def shorten(got: object) -> str:
    """Return the value as Python shows it, on one line; the middle of a long one is left out."""
    return _ONE_LINE_REPR.repr(got)


def printable(text: str, *, keeps: str = "") -> str:
    """Return a text of others as it may go to a terminal: what is not printable is shown in Python's escapes.

    Control characters, line ends, escape sequences, marks of the writing direction: with them a name, an event or a
    line of a log could move the cursor, recolour the screen or look like a line of ours.

    `keeps`: characters that stay as they are, such as line ends of a text of several lines.
    """
    if text.isprintable():
        return text
    shown = (each if each.isprintable() or each in keeps else each.encode("unicode_escape").decode() for each in text)
    return "".join(shown)


_DISK_FULL = "Free space on its disk, or name another folder"
_NOT_ALLOWED = "Let your user do it, or name another file or folder"
_TOO_MANY_FILES = "Close other programs, or raise the limit of open files (ulimit -n)"
_NO_MEMORY = "End other processes, or raise the limits of this one (ulimit -a)"
_REMEDIES = {
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f)",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.EMFILE: _TOO_MANY_FILES,
    errno.ENFILE: _TOO_MANY_FILES,
    errno.ENOMEM: _NO_MEMORY,
    errno.EAGAIN: _NO_MEMORY,
}


def from_system(error: BaseException) -> RingweaveError | None:
    """Return the error for what a user, a disk or a busy machine has brought about; None for anything else.

    A command prints it in place of a traceback: an operating system's error, no memory, no more threads, a damaged or
    locked database, text that cannot be encoded. Errors of several tasks count if all are of these kinds.
    """
    match error:
        case RingweaveError():
            return error
        case OSError():
            got, do = error.strerror or str(error), _REMEDIES.get(error.errno or 0, "Correct that, and try again")
            named = [
                os.fspath(each) for each in (error.filename, error.filename2) if each and not isinstance(each, int)
            ]
        case MemoryError():
            got, do, named = "no memory left", _NO_MEMORY, []
        case RuntimeError() if "can't start new thread" in str(error):
            got, do, named = str(error), _NO_MEMORY, []
        case UnicodeError():
            got, do, named = str(error), "Use names and files in UTF-8, and a locale such as C.UTF-8", []
        case BaseExceptionGroup():
            found = [from_system(each) for each in error.exceptions]
            return None if None in found else found[0]
        case _ if type(error).__module__.split(".")[0] in ("sqlite3", "subprocess", "psutil"):
            got, do, named = str(error), "Correct that, and try again; move a damaged file away", []
        case _:
            return None
    what = f"use of {' and '.join(map(_file_text, named))}" if named else "operation of this machine"
    return RingweaveError(what, got=got, expected="no error", do=do, where=_place_of(error))


def _file_text(name: str | bytes) -> str:
    return printable(os.fsdecode(name))


def _place_of(error: BaseException) -> str:
    """Return file and line of the last function of ours that the error has passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "ringweave" in Path(each.filename).parts]
    return f"{Path(*Path(ours[-1].filename).parts[-3:])}:{ours[-1].lineno}" if ours else ""


class _OneLineRepr(reprlib.Repr):
    """A `repr` of bounded length for values from outside."""

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


_ONE_LINE_REPR = _OneLineRepr()
