"""Checks of members' messages, and the errors that sessions raise in scripts."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import pydantic
from pydantic import ConfigDict, Field

from ringweave.comm.transport.interface import TransferFailedError
from ringweave.environment import WIRES
from ringweave.errors import DisagreementError, MembershipError, RingweaveError, TrainingError
from ringweave.files import file_io
from ringweave.membership.membership_records import Membership, MemberStatus, StopTraining
from ringweave.membership.messages import ADDRESS_PATTERN, MAX_NOTE_CHARS
from ringweave.topology import cgroups


def record_exit_failures() -> None:
    """Record a failure by `sys.exit` in `sys.last_value`, where the interpreter keeps the exception that ends a script.

    The interpreter keeps no SystemExit, so exit handlers could not distinguish it from a successful end. The launcher's
    entry module sees each SystemExit that ends a script. This function serves scripts that it does not run
    (`ringweave run --elastic 3:8 -- python train.py`); there, `raise SystemExit(1)` goes unnoticed until the slot has
    another process. A script that catches its own `sys.exit(1)` and continues is taken as failed; the others then end
    their training as after a death.
    """
    original_exit = sys.exit

    def noted(status: Any = None, /) -> NoReturn:
        if status not in (None, 0):
            sys.last_value = SystemExit(status)
        original_exit(status)

    sys.exit = noted


def script_has_failed() -> bool:
    """Return whether an exception or a failing `sys.exit` has ended the script."""
    return getattr(sys, "last_value", None) is not None


def describe_validation_error(error: pydantic.ValidationError) -> str:
    """Return the place and kind of the first validation error, without the invalid value."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "all of it"
    return f"{where}: {first['msg']}"


def busy_s(process: Path = cgroups.PROC_SELF) -> float:
    """Return the seconds in which this process computed, or its main thread waited for a processor.

    On a machine that is too busy, a process that makes no progress is still working, and not stuck.
    """
    return time.process_time() + (cgroups.ProcessorQueue(process).waited_s() or 0.0)


def suspected_members(error: BaseException, membership: Membership) -> list[str]:
    """Return the members that a failed transfer was with, or whose rows were of another size than those of most."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DisagreementError) and cause.culprits:
            return [membership.members[group_rank] for group_rank in cause.culprits]
        if isinstance(cause, TransferFailedError) and cause.peer is not None:
            return [membership.members[cause.peer]]
        cause = cause.__cause__
    return []


def stop_error(stop: StopTraining) -> MembershipError:
    """Return the error that the script raises when training stops."""
    what = "job" if stop.is_end else "this worker"
    state = "is over" if stop.is_end else "is no member any more"
    do = "Start it again: it joins with the state of the others"
    if stop.is_end:
        do = "See the coordinator's log"
    if stop.final_checkpoint_owner:
        owner = stop.final_checkpoint_owner
        do = f"Start it again: worker {owner} saves the state, if the script gave ringweave.Checkpoints its loader"
    return MembershipError(f"{what} {state}: {stop.reason}. {do}.")


def as_ringweave_error(error: Exception) -> RingweaveError:
    """Return the error that the script raises for a failure in the session's own thread."""
    if isinstance(error, RingweaveError):
        return error
    refusal = TrainingError(
        "elastic training", got=repr(error), expected="no failure", do="Report this as a bug of ringweave"
    )
    refusal.__cause__ = error
    return refusal


_MAX_INT64 = 2**63
_FINGERPRINTS = 2**64
_NON_NEGATIVE_INT = Annotated[int, Field(ge=0, lt=_MAX_INT64)]
_INT = Annotated[int, Field(gt=-_MAX_INT64, lt=_MAX_INT64)]
_ADDRESS = Annotated[str, Field(pattern=ADDRESS_PATTERN)]
_POSITIVE_FLOAT = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NON_NEGATIVE_FLOAT = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_NOISE = Annotated[float, Field(ge=0)]
_SPEED_NUMBERS = tuple[
    _POSITIVE_FLOAT, _NON_NEGATIVE_FLOAT, _NOISE, _NON_NEGATIVE_FLOAT, _NON_NEGATIVE_FLOAT, _NON_NEGATIVE_FLOAT
]
"""`Speed.to_numbers`."""
_ACCOUNT = tuple[_NON_NEGATIVE_INT, Annotated[int, Field(ge=0, lt=_FINGERPRINTS)]]
_MAX_WIRE_CHOICES = 16
_STRICT = ConfigDict(strict=True, extra="allow")
_AS_PREPARED = "the values of ringweave.prepare"

_ParsedT = TypeVar("_ParsedT")


def _check_wire_name(name: str) -> str:
    if name not in WIRES:
        raise ValueError(f"a wire format {name[:80]!r}, expected one of {', '.join(WIRES)}")
    return name


class _SessionDetails(pydantic.BaseModel):
    """Details of every member."""

    model_config = _STRICT

    store: _ADDRESS
    collectives: _NON_NEGATIVE_INT = 0
    operation: str = ""


class _TrainerDetails(pydantic.BaseModel):
    """Details of a member that trains."""

    model_config = _STRICT

    cap: Annotated[int, Field(ge=1, lt=_MAX_INT64)] | None
    assumed_speed: _POSITIVE_FLOAT
    must_match: dict[str, Any]
    speed: _SPEED_NUMBERS | None
    exchange_s: _NON_NEGATIVE_FLOAT
    position: tuple[_NON_NEGATIVE_INT, _NON_NEGATIVE_INT, _NON_NEGATIVE_INT, _INT]
    accounts: tuple[_ACCOUNT, _ACCOUNT, _ACCOUNT]
    wires: Annotated[
        tuple[tuple[_NON_NEGATIVE_INT, Annotated[str, pydantic.AfterValidator(_check_wire_name)]], ...],
        Field(max_length=_MAX_WIRE_CHOICES),
    ] = ()
    trial_s: _POSITIVE_FLOAT | None = None


_SESSION_ADAPTER, _TRAINER_ADAPTER = pydantic.TypeAdapter(_SessionDetails), pydantic.TypeAdapter(_TrainerDetails)
_PROFILE_ADAPTER = pydantic.TypeAdapter(dict[str, Any], config=ConfigDict(strict=True))


def parse_details(member: str, text: str) -> dict[str, Any]:
    """Parse the details of a member of a session.

    Raises:
        TrainingError: The text is malformed.
    """
    return _parse_note(member, text, _SESSION_ADAPTER).model_dump()


def parse_profile(member: str, text: str) -> dict[str, Any]:
    """Parse the profile of a member of the startup rendezvous.

    Raises:
        TrainingError: The text is no JSON object.
    """
    return _parse_note(member, text, _PROFILE_ADAPTER)


def check_trainer_details(status: MemberStatus, details: Mapping[str, Any]) -> None:
    """Check that a status and its details have everything that members that train together need.

    Raises:
        TrainingError: Something is missing or malformed.
    """
    if not status.address:
        raise _details_error("address", status.member, "none", "where its state can be read, as HOST PORT")
    text = json.dumps(details)
    _parse_note(status.member, text, _TRAINER_ADAPTER, len(text))


def _parse_note(
    member: str, text: str, adapter: pydantic.TypeAdapter[_ParsedT], max_chars: int = MAX_NOTE_CHARS
) -> _ParsedT:
    if len(text) > max_chars:
        raise _details_error("note", member, f"{len(text)} characters", f"at most {max_chars}")
    try:
        return adapter.validate_json(file_io.bounded(text, max_chars))
    except pydantic.ValidationError as error:
        raise _details_error("note", member, describe_validation_error(error), _AS_PREPARED) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise _details_error("note", member, str(error) or type(error).__name__, _AS_PREPARED) from None


def _details_error(what: str, member: str, got: str, expected: str) -> TrainingError:
    do = "Run the same ringweave on all workers"
    return TrainingError(f"{what} of worker {member}", got=got, expected=expected, do=do)
