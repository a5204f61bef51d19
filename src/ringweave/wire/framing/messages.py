"""Messages: small typed headers, checked on both sides, with large buffers beside them that are never parsed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pydantic
from typing_extensions import Buffer

from ringweave.errors import MessageError, explain


class Message(pydantic.BaseModel):
    """Base of all messages: frozen, unknown fields are errors, types are not bent.

    A message that is answered names the class of the answer in `reply`; without one it is `Done`.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    kind: ClassVar[str]
    """Name of the message on the wire: `params.push`; at most 64 ASCII characters, unique on a server."""
    reply: ClassVar[type["Message"]]


class Done(Message):
    """An answer that says no more than that it is done."""

    kind: ClassVar[str] = "done"


Message.reply = Done

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler returns: a message and its buffers, which must not change until they are sent."""

    message: Message
    buffers: Sequence[Buffer] = ()


class Hello(Message):
    """The first message of a client. It holds the job's token, maybe not where it should: no error shows any of it."""

    model_config = pydantic.ConfigDict(hide_input_in_errors=True)

    kind: ClassVar[str] = "hello"

    token: str = pydantic.Field(repr=False)
    identity: str


class Welcome(Message):
    """The first message of a server: who it is, and what it takes at most."""

    kind: ClassVar[str] = "welcome"

    identity: str
    max_body_bytes: int
    max_buffers: int
    max_message_bytes: int
    max_calls: int


class Failure(Message):
    """Why there is no answer."""

    kind: ClassVar[str] = "failure"

    error: str
    """Name of the error's class."""
    text: str
    """Its text, in the house's form where it is an error of ours."""


def encode(message: Message) -> bytes:
    """A message without its buffers, as JSON."""
    return message.model_dump_json().encode()


def decode(model: type[M], body: bytes) -> M:
    """The message of that class in these bytes.

    Raises:
        MessageError: They are not one; the text names the field, and shows its value unless the class hides its input.
    """
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as cause:
        first: Any = cause.errors(include_url=False, include_context=False)[0]
        is_hidden = model.model_config.get("hide_input_in_errors", False)
        # A key that the class does not know is input too.
        place = ".".join(str(key) for key in first["loc"] if not is_hidden or key in model.model_fields)
        raise MessageError(
            explain(
                f"message {model.kind}" + (f", {place[:80]}" if place else ""),
                got=first["type"] if is_hidden else first.get("input"),
                expected=f"a valid one ({first['msg'][:120]})",
                do="Run the same ringweave on all nodes",
            )
        ) from cause
