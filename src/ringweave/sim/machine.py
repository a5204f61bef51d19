"""What the ranks' machines and the queues between them add to the time that the links' rates say."""

import math
from dataclasses import dataclass
from typing import Self

from ringweave.cost import Assumptions

MESSAGE_S, INSIDE_MESSAGE_S, WAKE_S, KERNEL_S_PER_BYTE, START_S = 48e-6, 30e-6, 14.5e-6, 0.24e-9, 0.85e-3
"""Fitted to the measured processor time of 189 kinds of allreduce in labs (bench/simulation/processor_costs.py): each
end of a message and of its bytes, each waking up (as often as the simulation has it), and the beginning of each rank.
Half of the kinds are off by more than 15 % of that, one in twenty by more than 37 %. Nothing is fitted to how long they
took."""
SEND_BUFFER_BYTES, RECEIVE_BUFFER_BYTES = 1e6, 4e6
"""About what Linux comes to by itself on links of some 100 Mbit/s to some Gbit/s."""
WINDOW_BYTES, BURST_BYTES = 128 * 2**10, 4 * 2**10
"""About what Linux has under way on such links, and three packets."""
UNEVENNESS = 0.43
"""Measured, no schedule in it: seven streams into one NIC of a lab, 1 to 25 MB each, 18 rounds
(bench/simulation/incast.py)."""
UNEVEN_TURNS, REDEAL_S = 0.65, 1.3
"""Likewise, three streams out of the slow NIC of a lab, half a MB each, 6 rounds (bench/simulation/outcast.py); of 8 MB
each 0.37, as if turns were dealt anew so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Costs of processors and memory, buffers of the kernel, queues. The defaults are none: the network alone."""

    message_s: float = 0.0
    """Processor time of a rank for each message that it sends to or receives from another node."""
    inside_message_s: float = 0.0
    """The same inside its node."""
    kernel_s_per_byte: float = 0.0
    """Processor time of a rank for each byte that it sends to or receives from another node."""
    wake_s: float = 0.0
    """Processor time of a rank each time that it wakes up: a message or a burst of one has come, or one has left."""
    start_s: float = 0.0
    """Processor time of a rank before its first message."""
    combine_s_per_byte: float = 0.0
    """Time to add what came from another node to the message."""
    inside_s_per_byte: float = 0.0
    """Time to move what goes from rank to rank inside a node, half of it to show and half to read it."""
    send_buffer_bytes: float = math.inf
    """What the kernel takes of a connection ahead of the network: so much may be gone from a rank's memory that is not
    on the wire yet."""
    receive_buffer_bytes: float = math.inf
    """What the kernel keeps of a connection that no receive is posted for; then the sender has to wait."""
    burst_bytes: float = math.inf
    """What goes from link to link in one piece, and waits in a switch while the next link is busy. Infinite: there are
    no queues, and a stream moves on all links of its route at once."""
    window_bytes: float = math.inf
    """What a stream may have under way, where there are queues."""
    unevenness: float = 0.0
    """Standard deviation of the logarithm of the windows of streams that meet, where there are queues. 0: they share
    links evenly. The same streams get the same windows each time, spread as draws would be."""
    uneven_turns: float = 0.0
    """The same of the turns of streams that leave one node, where its link is slower than those that they end with."""
    redeal_s: float = math.inf
    """How often those turns are dealt anew."""
    bucket_bytes: float = 0.0
    """What a link that was idle for long lets pass at once, where there are queues: the token buckets of a lab do."""
    num_processors: int | None = None
    """Processors that *all* nodes share, as in a lab, which one machine plays; None: each rank has its own."""

    def __post_init__(self) -> None:
        costs = (self.message_s, self.inside_message_s, self.kernel_s_per_byte, self.wake_s, self.start_s)
        costs += (self.combine_s_per_byte, self.inside_s_per_byte)
        sizes = (self.send_buffer_bytes, self.receive_buffer_bytes, self.bucket_bytes)
        if any(not 0 <= cost < math.inf for cost in costs) or any(not size >= 0 for size in sizes):
            raise ValueError(f"machine: {self}, expected finite times and sizes, none negative")
        if not (self.burst_bytes > 0 and self.window_bytes > 0):
            raise ValueError(f"machine: {self}, expected bursts and windows of more than 0 bytes")
        for name in ("unevenness", "uneven_turns"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"machine: {name} {value}, expected a finite number, not negative")
        if not self.redeal_s > 0:
            raise ValueError(f"machine: redeal_s {self.redeal_s}, expected more than 0 s")
        if self.num_processors is not None and self.num_processors < 1:
            raise ValueError(f"machine: {self.num_processors} processors, expected at least one, or None")

    @classmethod
    def assumed(cls, assumptions: Assumptions | None = None) -> Self:
        """What Linux and this program's own work are taken for; memory as planning assumes it, None being its default.

        Processor time is split into messages and bytes here, where planning counts pieces of a usual size. With less
        than a whole processor all of it lasts longer.
        """
        assumed = assumptions or Assumptions()
        slowness = max(1.0, 1 / assumed.cores)
        s_per_byte = slowness / assumed.memory_bytes_per_s
        return cls(
            message_s=MESSAGE_S * slowness,
            inside_message_s=INSIDE_MESSAGE_S * slowness,
            kernel_s_per_byte=KERNEL_S_PER_BYTE * slowness,
            wake_s=WAKE_S * slowness,
            start_s=START_S * slowness,
            combine_s_per_byte=s_per_byte,
            inside_s_per_byte=s_per_byte,
            send_buffer_bytes=SEND_BUFFER_BYTES,
            receive_buffer_bytes=RECEIVE_BUFFER_BYTES,
            burst_bytes=BURST_BYTES,
            window_bytes=WINDOW_BYTES,
            unevenness=UNEVENNESS,
            uneven_turns=UNEVEN_TURNS,
            redeal_s=REDEAL_S,
        )
