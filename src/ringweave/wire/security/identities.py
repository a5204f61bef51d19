"""The name of a process of a job, as its certificate carries it."""

import re
from dataclasses import dataclass

from ringweave.errors import UsageError, explain

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_URI = re.compile(r"ringweave://([^/]*)/([^/]*)/([^/]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """One process of one job; written `ringweave://JOB/ROLE/NAME`."""

    job: str
    """Id of the job; processes of different jobs never talk to each other."""
    role: str
    """What the process is: `worker`, `server`, `coordinator`."""
    name: str
    """Which one of that role: a rank, a node or both, such as `3` or `a0-1`."""

    def __post_init__(self) -> None:
        for what, part in (("job", self.job), ("role", self.role), ("name", self.name)):
            if not _PART.fullmatch(part):
                raise UsageError(
                    explain(
                        f"{what} of an identity",
                        got=part,
                        expected="1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first",
                        do="Rename it",
                    )
                )

    def __str__(self) -> str:
        return f"ringweave://{self.job}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """The identity that prints as `text`.

        Raises:
            UsageError: It is not one.
        """
        match = _URI.fullmatch(text)
        if match is None:
            raise UsageError(
                explain("identity", got=text, expected="ringweave://JOB/ROLE/NAME", do="Write all three parts")
            )
        return cls(job=match[1], role=match[2], name=match[3])
