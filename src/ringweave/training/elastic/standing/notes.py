"""What members say to each other through the coordinator, read as if strangers had written it: bounds, a schema."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import ConfigDict, Field

from ringweave.errors import RingweaveError, TrainingError, explain
from ringweave.membership.messages import MAX_NOTE, PLACE
from ringweave.membership.rules.records import Standing
from ringweave.training.elastic.refusals import in_words

_MOST = 2**63
_FINGERPRINTS = 2**64
_NUMBER = Annotated[int, Field(ge=0, lt=_MOST)]
_PLACE = Annotated[str, Field(pattern=PLACE)]
_POSITIVE = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_REST = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_ACCOUNT = tuple[_NUMBER, Annotated[int, Field(ge=0, lt=_FINGERPRINTS)]]
_STRICT = ConfigDict(strict=True, extra="allow")
_AS_PREPARED = "what ringweave.prepare says"

_Found = TypeVar("_Found")


class _Session(pydantic.BaseModel):
    """What every member's note has."""

    model_config = _STRICT

    store: _PLACE


class _Crew(pydantic.BaseModel):
    """What a member's note has that trains."""

    model_config = _STRICT

    cap: Annotated[int, Field(ge=1, lt=_MOST)] | None
    assumed_speed: _POSITIVE
    alike: dict[str, Any]
    speed: tuple[_POSITIVE, _REST, Annotated[float, Field(ge=0)]] | None
    place: tuple[_NUMBER, _NUMBER, _NUMBER, _NUMBER]
    books: tuple[_ACCOUNT, _ACCOUNT, _ACCOUNT]


def note_of(member: str, text: str) -> dict[str, Any]:
    """The note of a member of a session.

    Raises:
        TrainingError: It is none.
    """
    return _read("note", member, text, MAX_NOTE, lambda: _Session.model_validate_json(text).model_dump())


def said_of(member: str, text: str) -> dict[str, Any]:
    """The note of a member that says something else there.

    Raises:
        TrainingError: It is no JSON object.
    """
    adapter = pydantic.TypeAdapter(dict[str, Any])
    return _read("note", member, text, MAX_NOTE, lambda: adapter.validate_json(text, strict=True))


def check_crew(standing: Standing, note: Mapping[str, Any]) -> None:
    """Make sure that a standing and its note have what those who train together have to know.

    Raises:
        TrainingError: They have not.
    """
    if not standing.place:
        raise _refusal("place", standing.member, "none", "where its state can be read, as HOST PORT")
    text = json.dumps(note)
    _read("note", standing.member, text, MAX_NOTE + len(text), lambda: _Crew.model_validate_json(text))


def _read(what: str, member: str, text: str, most: int, read: Callable[[], _Found]) -> _Found:
    if len(text) > most:
        raise _refusal(what, member, f"{len(text)} characters", f"at most {most}")
    try:
        return read()
    except pydantic.ValidationError as error:
        raise _refusal(what, member, in_words(error), _AS_PREPARED) from None
    except (ValueError, OverflowError, RecursionError, RingweaveError) as error:
        raise _refusal(what, member, str(error) or type(error).__name__, _AS_PREPARED) from None


def _refusal(what: str, member: str, got: str, expected: str) -> TrainingError:
    do = "Run the same ringweave on all workers"
    return TrainingError(explain(f"{what} of worker {member}", got=got, expected=expected, do=do))
