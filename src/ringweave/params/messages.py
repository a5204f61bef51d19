"""What rings and the parameter server say to each other. Every message carries the term of the server that is meant.

A server that takes over begins a higher term, and refuses messages of an earlier one, so that whoever has slept through
the change can do no harm.
"""

import math
from typing import ClassVar, Literal

import pydantic

from ringweave import wire

Option = bool | int | float | str | list[float] | None
Count = pydantic.NonNegativeInt
SpanWords = tuple[Count, pydantic.PositiveInt]
"""`rules.Span`."""


class TensorSpec(pydantic.BaseModel):
    """One parameter of the model."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    shape: list[Count]
    dtype: str
    """As torch prints it, without `torch.`: `float32`."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


class Group(pydantic.BaseModel):
    """A group of parameters with the same options of the optimizer."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    parameters: list[Count]
    """Their places among the tensors."""
    options: dict[str, Option]


class Setup(pydantic.BaseModel):
    """All that the server has to know of a job."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    tensors: list[TensorSpec]
    optimizer: str
    """Class of `torch.optim`."""
    groups: list[Group]
    rings: list[list[Count]]
    """Global ranks of each ring; the first is its representative at the start."""
    overlaps: bool
    compensation: float
    shares: list[list[Count]] = pydantic.Field(default_factory=list)
    """Samples of each of those ranks in a whole batch at the start, for workers that come later; empty if none do."""
    local_steps: list[Count] = pydantic.Field(default_factory=list)
    """Of each ring, from one push to the next, likewise; empty where every step is pushed."""

    @property
    def may_lose_members(self) -> bool:
        """Rings go on without a worker that dies; else the run ends with it."""
        return bool(self.shares)


class Start(wire.Message):
    """The job begins; with the initial parameters, one buffer for each dtype. Rank 0 sends it once."""

    kind: ClassVar[str] = "params.start"

    term: Count
    setup: Setup


class Rehearsed(wire.Message):
    """An exchange was rehearsed; with parameters that nobody needs, one buffer for each dtype."""

    kind: ClassVar[str] = "params.rehearsed"

    processor_s: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """Of the server since its start: two answers tell what is between them."""
    cores: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    """Processor time by the second that a quota leaves the server; None where there is no quota."""


class Rehearse(wire.Message):
    """Before the job begins: do what a push and a pull need, on parameters of zero; one buffer for each dtype."""

    kind: ClassVar[str] = "params.rehearse"
    reply: ClassVar[type[wire.Message]] = Rehearsed

    term: Count
    setup: Setup


class RehearsalOver(wire.Message):
    """This process rehearses no more; the last one to say so frees the memory."""

    kind: ClassVar[str] = "params.rehearsal_over"

    term: Count


class Pushed(wire.Message):
    """A push was applied: now, or when it came for the first time."""

    kind: ClassVar[str] = "params.pushed"

    version: Count
    staleness_versions: Count
    damping: float
    is_repeat: bool


class Push(wire.Message):
    """What a ring has computed; one buffer for each dtype."""

    kind: ClassVar[str] = "params.push"
    reply: ClassVar[type[wire.Message]] = Pushed

    term: Count
    ring: Count
    sequence: pydantic.PositiveInt
    base_version: Count
    content: Literal["gradient", "change"]
    """A mean gradient over the ring's samples, or by how much its parameters changed in its local steps."""
    num_samples: Count
    batch_share: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """The ring's part of a train step of all rings: what the push counts for."""
    num_batches: pydantic.PositiveInt = 1
    """Train steps of the ring that a change is of."""
    pass_number: Count = 0
    """Of the pass over the data that its samples are of."""
    epoch: Count = 0
    """That the pass is of."""
    spans: list[SpanWords] = pydantic.Field(default_factory=list)
    """Which samples of it: places in the order of the whole epoch."""
    absent: list[Count] = pydantic.Field(default_factory=list)
    """Places of parameters that have no gradient."""
    options: list[dict[str, Option]] = pydantic.Field(default_factory=list)
    """Of each group, as they are now: schedulers change them. Empty with a change."""
    testament: str = pydantic.Field(default="", max_length=4096)
    """What the others shall hear where all rings meet, if nobody of this one is left by then."""


class Pulled(wire.Message):
    """The parameters; one buffer for each dtype."""

    kind: ClassVar[str] = "params.pulled"

    version: Count


class Pull(wire.Message):
    """Asks for the parameters, once the ring's push of that number is applied and no ring is left too far behind."""

    kind: ClassVar[str] = "params.pull"
    reply: ClassVar[type[wire.Message]] = Pulled

    term: Count
    ring: Count
    after_sequence: Count


class Taken(wire.Message):
    """Samples `first` to `first + num_samples - 1` of the epoch's order; none when it is used up."""

    kind: ClassVar[str] = "params.taken"

    first: Count
    num_samples: Count


class Take(wire.Message):
    """Asks for the samples that a ring computes next."""

    kind: ClassVar[str] = "params.take"
    reply: ClassVar[type[wire.Message]] = Taken

    term: Count
    ring: Count
    number: pydantic.PositiveInt
    epoch: Count
    num_samples: pydantic.PositiveInt
    least: pydantic.PositiveInt
    epoch_samples: Count
    ended_epoch: Count | None = None
    """The pass, which was of that epoch, was broken off: what the ring takes nobody computes."""


class Leave(wire.Message):
    """The ring computes nothing until it pulls again, so that nobody waits for it."""

    kind: ClassVar[str] = "params.leave"

    term: Count
    ring: Count
    is_for_good: bool
    """It has done its last push."""


class Regroup(wire.Message):
    """Ranks form other rings from here on, while all of them rest; pushes and tickets are counted from 1 again."""

    kind: ClassVar[str] = "params.regroup"

    term: Count
    ring: Count
    """Of the caller, as the rings still are."""
    rings: list[list[Count]]
    """Of all ranks that there are; the first of each is its representative."""


class Speak(wire.Message):
    """This process is the ring's representative, in that epoch of its membership; whoever was before is not heard."""

    kind: ClassVar[str] = "params.speak"

    term: Count
    ring: Count
    ballot: tuple[Count, Count]


class Pause(wire.Message):
    """The ring has lost a member and forms anew: until it pushes or pulls again, nobody waits for it."""

    kind: ClassVar[str] = "params.pause"

    term: Count
    ring: Count


class Met(wire.Message):
    """All rings that there are have come to the meeting of that number: what each said, by ring.

    For rings of which nobody came their testaments are in it.
    """

    kind: ClassVar[str] = "params.met"

    said: dict[str, str]


class Meet(wire.Message):
    """The ring is through with its pass, and waits until all others are; those that are gone are not waited for."""

    kind: ClassVar[str] = "params.meet"
    reply: ClassVar[type[wire.Message]] = Met

    term: Count
    ring: Count
    number: pydantic.PositiveInt
    """Of the meeting, counted from 1. Two follow each pass: at its end, and when all have the same parameters."""
    epoch: Count = 0
    """That the pass was."""
    said: str = pydantic.Field(max_length=4096)
    """What the others shall know."""


class Seated(wire.Message):
    """The rings, and where one of them stands: what a worker has to know that takes the place of another one."""

    kind: ClassVar[str] = "params.seated"

    rings: list[list[Count]]
    """Empty before the job has begun."""
    shares: list[list[Count]] = pydantic.Field(default_factory=list)
    """As the setup has them."""
    local_steps: list[Count] = pydantic.Field(default_factory=list)
    """Likewise."""
    num_pushed: Count = 0
    num_tickets: Count = 0
    num_meetings: Count = 0
    """Of passes that the ring has completed."""
    epoch: Count = 0
    """That the ring is in."""
    testament: str = ""
    """That came with the ring's last push."""
    resumed: list[SpanWords] = pydantic.Field(default_factory=list)
    """Samples of `resumed_epoch` that were done before this run."""
    resumed_epoch: Count = 0
    resumed_seed: int | None = None
    """Of the orders of all epochs, if the job goes on from a checkpoint."""


class Seek(wire.Message):
    """A worker asks for its ring."""

    kind: ClassVar[str] = "params.seek"
    reply: ClassVar[type[wire.Message]] = Seated

    term: Count
    slot: Count
    """Rank of the worker at the start."""
    begins: bool = False
    """The ring begins, or begins again: nobody of it has anything under way."""


class Status(wire.Message):
    """What the server has done so far."""

    kind: ClassVar[str] = "params.status"

    version: Count
    staleness: dict[str, Count]
    """Staleness in versions -> how many pushes were that old."""
    pushes: dict[str, Count]
    """Ring -> pushes applied."""
    samples: Count
    repeats: Count
    received_bytes: Count
    sent_bytes: Count
    most_peers: Count
    """Most workers that were connected at once: one for each ring."""
    train_steps: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """Of all rings together: samples pushed, in steps of synchronous training."""
    memory_bytes: Count
    """Tensors held: parameters, the optimizer's state, gradients of the present train step, what is being received
    and sent."""


class Entered(wire.Message):
    """Whether this server leads, and since which term."""

    kind: ClassVar[str] = "params.entered"

    term: Count
    leads: bool


class Enter(wire.Message):
    """Asks for that; and shows that whoever asks is there."""

    kind: ClassVar[str] = "params.enter"
    reply: ClassVar[type[wire.Message]] = Entered


class Ask(wire.Message):
    """Asks for that."""

    kind: ClassVar[str] = "params.ask"
    reply: ClassVar[type[wire.Message]] = Status
