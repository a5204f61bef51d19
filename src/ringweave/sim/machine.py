"""What the ranks' machines add to the time that the network takes."""

import math
from dataclasses import dataclass
from typing import Self

from ringweave.cost import Assumptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Costs of processors and memory, and buffers of the kernel. The defaults are none: the network alone."""

    message_s: float = 0.0
    """Processor time of a rank for each message that it sends or receives."""
    combine_s_per_byte: float = 0.0
    """Time to add what came from another node to the message."""
    inside_s_per_byte: float = 0.0
    """Time to move what goes from rank to rank inside a node, half of it to show and half to read it."""
    send_buffer_bytes: float = math.inf
    """What the kernel takes of a connection ahead of the network: so much may be gone from a rank's memory that is not
    on the wire yet."""
    receive_buffer_bytes: float = math.inf
    """What the kernel keeps of a connection that no receive is posted for; then the sender has to wait."""
    num_processors: int | None = None
    """Processors that *all* nodes share, as in a lab, which one machine plays; None: each rank has its own."""

    def __post_init__(self) -> None:
        numbers = (self.message_s, self.combine_s_per_byte, self.inside_s_per_byte)
        buffers = (self.send_buffer_bytes, self.receive_buffer_bytes)
        if any(not 0 <= number < math.inf for number in numbers) or any(not size >= 0 for size in buffers):
            raise ValueError(f"machine: {self}, expected finite times and sizes, none negative")
        if self.num_processors is not None and self.num_processors < 1:
            raise ValueError(f"machine: {self.num_processors} processors, expected at least one, or None")

    @classmethod
    def assumed(cls, assumptions: Assumptions | None = None) -> Self:
        """What planning assumes of machines; None is the default assumptions."""
        assumed = assumptions or Assumptions()
        s_per_byte = 1 / assumed.memory_bytes_per_s
        return cls(
            message_s=assumed.message_s,
            combine_s_per_byte=s_per_byte,
            inside_s_per_byte=s_per_byte,
            send_buffer_bytes=SEND_BUFFER_BYTES,
            receive_buffer_bytes=RECEIVE_BUFFER_BYTES,
        )


SEND_BUFFER_BYTES, RECEIVE_BUFFER_BYTES = 1e6, 4e6
"""About what Linux comes to by itself on links of some 100 Mbit/s to some Gbit/s."""
