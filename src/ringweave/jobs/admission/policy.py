"""The policy file: who may use which verbs, on whose jobs, and with how many GPUs. The format is in docs/jobs.md."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ringweave.errors import JobError
from ringweave.files import problems, reading, schema
from ringweave.files.problems import Problem, closest
from ringweave.files.reading import FileKind
from ringweave.jobs.admission.permissions import VERBS, Permission

KIND = FileKind(
    noun="policy file",
    error=JobError,
    keys="a map with the key rules",
    begin='Begin with "rules:", then list them',
    shrink="Use * for all users",
)
EVERYBODY = "*"
_USERS = f"a list of user names, or {EVERYBODY} for everybody"
_VERBS = f"a list of {', '.join(VERBS)}"
_GPUS = "a whole number of at least 0: GPUs of all jobs of a user that have not ended"


class RuleEntry(schema.Entry):
    """One item of `rules`."""

    users: list[str] = Field(description=_USERS, examples=["[ann, bob]"])
    verbs: Annotated[list[str] | None, schema.GIVEN] = Field(
        default=None, description=_VERBS, examples=["[submit, stop]"]
    )
    jobs: str = Field(default="own", description="own or all: on whose jobs", examples=["own"])
    max_gpus: Annotated[int | None, schema.GIVEN] = Field(default=None, description=_GPUS, examples=["16"])


class PolicyEntry(schema.Entry):
    """The whole file."""

    rules: list[RuleEntry] = Field(description="a list of rules", examples=["[{users: [ann], max_gpus: 16}]"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Some users may use some verbs."""

    users: tuple[str, ...]
    """Their names; `*` is everybody."""
    verbs: tuple[str, ...] = VERBS
    """What they may do."""
    any_owner: bool = False
    """Also with other people's jobs."""
    max_gpus: int | None = None
    """Limit over all their jobs that have not ended; None: none."""

    def speaks_of(self, requester: str, verb: str) -> bool:
        """It allows this."""
        return verb in self.verbs and (requester in self.users or EVERYBODY in self.users)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Rules of which each allows something; what none allows is forbidden."""

    rules: tuple[Rule, ...]
    """In the order of the file, which does not matter."""

    def permission(self, requester: str, verb: str) -> Permission:
        """What the rules together allow: the widest of those that speak of the two."""
        speaking = [rule for rule in self.rules if rule.speaks_of(requester, verb)]
        if not speaking:
            return Permission(allowed=False, text=f"no rule of the policy lets {requester} {verb}")
        limits = [rule.max_gpus for rule in speaking]
        return Permission(
            allowed=True,
            text="the policy",
            any_owner=any(rule.any_owner for rule in speaking),
            max_gpus=None if None in limits else max(limit for limit in limits if limit is not None),
        )


OPEN = Policy(rules=(Rule(users=(EVERYBODY,)),))
"""What holds where there is no policy file: everybody may do everything, with their own jobs."""


def load(path: str | os.PathLike[str]) -> Policy:
    """The policy that a file holds.

    Raises:
        JobError: It cannot be read or is wrong; the text says where and what to do.
    """
    return reading.load(path, KIND, _build)


def loads(text: str, *, source: str = "<text>") -> Policy:
    """The policy that a text holds.

    Raises:
        JobError: It is wrong.
    """
    return reading.loads(text, KIND, _build, source=source)


def _build(value: Any) -> Policy:
    entry = schema.read(PolicyEntry, value, KIND.noun)
    problems.refuse_any(_problems(entry))
    return Policy(rules=tuple(_rule(item) for item in entry.rules))


def _rule(entry: RuleEntry) -> Rule:
    verbs = VERBS if entry.verbs is None else tuple(entry.verbs)
    return Rule(users=tuple(entry.users), verbs=verbs, any_owner=entry.jobs == "all", max_gpus=entry.max_gpus)


def _problems(entry: PolicyEntry) -> Iterator[Problem]:
    for index, rule in enumerate(entry.rules):
        for place, verb in enumerate(rule.verbs or ()):
            if verb not in VERBS:
                do = closest(verb, VERBS) or "Leave verbs out for all of them"
                path = ("rules", index, "verbs", place)
                yield Problem(path=path, what="verb", got=verb, expected=f"one of {', '.join(VERBS)}", do=do)
        if rule.jobs not in ("own", "all"):
            do = closest(rule.jobs, ("own", "all")) or "Leave it out for own"
            yield Problem(path=("rules", index, "jobs"), what="jobs", got=rule.jobs, expected="own or all", do=do)
        if rule.max_gpus is not None and rule.max_gpus < 0:
            path, do = ("rules", index, "max_gpus"), "Leave it out for no limit"
            yield Problem(path=path, what="max_gpus", got=rule.max_gpus, expected=_GPUS, do=do)
