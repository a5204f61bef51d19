"""Who computes what of batches that were drawn and do not count yet, as text that passes through the coordinator."""

import json
from collections.abc import Sequence
from typing import Annotated

import pydantic
from pydantic import Field

from ringweave.errors import TrainingError, explain
from ringweave.membership.messages import MAX_MEMBERS, MAX_SHARING, MEMBER
from ringweave.training.elastic.refusals import in_words
from ringweave.training.elastic.rosters import Roster

_NUMBER = Annotated[int, Field(ge=0, lt=2**63)]
_MOST = 4096
"""Rosters of batches that are open at the same time: as many as there are backward passes to one update, at most."""


class _Roster(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    first_batch: _NUMBER
    members: Annotated[list[Annotated[str, Field(pattern=rf"^{MEMBER}$")]], Field(min_length=1, max_length=MAX_MEMBERS)]
    shares: list[_NUMBER]

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "_Roster":
        if len(self.shares) != len(self.members) or not any(self.shares):
            raise ValueError(f"{self.shares[:8]} of {len(self.members)} members, expected one of each, not all 0")
        return self


_ADAPTER = pydantic.TypeAdapter(Annotated[list[_Roster], Field(max_length=_MOST)])


def to_text(sharing: Sequence[Roster]) -> str:
    """As `of_text` reads it."""
    words = [{"first_batch": each.first_batch, "members": each.members, "shares": each.shares} for each in sharing]
    return json.dumps(words, separators=(",", ":"))


def of_text(text: str) -> list[Roster]:
    """The rosters that `to_text` put so; none of an empty text.

    Raises:
        TrainingError: It is something else.
    """
    if not text:
        return []
    if len(text) > MAX_SHARING:
        raise _refusal(f"{len(text)} characters", f"at most {MAX_SHARING}")
    try:
        found = _ADAPTER.validate_json(text)
    except pydantic.ValidationError as error:
        raise _refusal(in_words(error), "who computes what, of each") from None
    return [
        Roster(first_batch=each.first_batch, members=tuple(each.members), shares=tuple(each.shares)) for each in found
    ]


def _refusal(got: str, expected: str) -> TrainingError:
    return TrainingError(
        explain("batches that were drawn", got=got, expected=expected, do="Run the same ringweave on all nodes")
    )
