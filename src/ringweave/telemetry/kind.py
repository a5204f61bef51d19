"""What a kind of event is, and what many kinds have in common."""

from collections.abc import Mapping
from dataclasses import dataclass

RANK = "global rank of the worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of event."""

    meaning: str
    """What has happened when such an event is in the log."""
    written_by: str
    """Who writes it: the launcher, a worker's backend, a server of the job, or chaos."""
    fields: Mapping[str, str]
    """Name -> meaning of every field beside `time` and `kind`; all of them are present in every event of the kind."""
