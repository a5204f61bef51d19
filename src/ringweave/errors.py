"""The one tree of errors.

```text
RingweaveError                something ringweave refuses or cannot do       exit code 1
├── UsageError                wrong usage or input of a command              exit code 2
│   └── ClusterError          a cluster file, or a fact about it, is wrong
├── PlacementError            a rank cannot be put on a node of the cluster
├── ScheduleError             a schedule is malformed or does not compute its collective
├── LaunchError               workers could not be started or stopped
└── CommunicationError        a collective could not be run
    ├── PeerError             another rank died, vanished or hangs
    └── DisagreementError     ranks do not run the same thing
```

A text reads `<what failed>: <value we got>, expected <what is allowed>. <What to do>. [<where>]`.
User errors are printed without a traceback; a traceback always means a bug of ours.
"""


class RingweaveError(Exception):
    """Base of every error that ringweave raises on purpose; `exit_code` is what a command ends with."""

    exit_code = 1


class UsageError(RingweaveError):
    """What the user typed or wrote is not allowed."""

    exit_code = 2


class ClusterError(UsageError):
    """A cluster file, or a value in it, is wrong."""


class PlacementError(RingweaveError):
    """A rank cannot be put on a node of the cluster."""


class ScheduleError(RingweaveError):
    """A schedule is malformed, or does not compute its collective."""


class LaunchError(RingweaveError):
    """Workers could not be started or stopped."""


class CommunicationError(RingweaveError, RuntimeError):
    """A collective could not be run. Also a RuntimeError, as torch.distributed's own failures are."""


class PeerError(CommunicationError):
    """Another rank died, vanished or hangs; the text names its rank and node."""


class DisagreementError(CommunicationError):
    """Ranks of one group do not run the same schedule or the same collective."""


def explain(what: str, *, got: object, expected: str, do: str, where: str = "") -> str:
    """Compose the text of an error in the house's form.

    Args:
        what: What failed, without a full stop: `nic rate of node a0`.
        got: The offending value, shown as Python would show it.
        expected: What is allowed, completing "expected ...".
        do: What to do about it, one sentence without a full stop.
        where: File and key, or rank and step; empty where there is none.

    Returns:
        `<what>: <got>, expected <expected>. <do>. [<where>]`
    """
    place = f" [{where}]" if where else ""
    return f"{what}: {got!r}, expected {expected}. {do}.{place}"
