"""Faults of the bridge that tests plant: each breaks one rule that keeps the copies of both sides in order."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from ringweave.comm import bridge
from ringweave.comm.engine.engine import CompiledProgram
from tests.comm.bridge.simulated_device import EARLY, LATE, SimulatedDevice, Stream
from tests.comm.bridge.worlds import Case, Fault


class WaitDropped(Fault):
    """The program does not wait for a segment."""

    kind = LATE

    def __init__(self, segment: int) -> None:
        self.segment = segment

    def opened(self, staged: Any, case: Case) -> None:
        wait = staged.wait_fetched
        staged.wait_fetched = lambda segment: None if segment == self.segment else wait(segment)


class PutEarly(Fault):
    """A segment goes back before its last arrival."""

    kind = EARLY

    def __init__(self, segment: int) -> None:
        self.segment = segment

    def program(self, program: CompiledProgram) -> CompiledProgram:
        marks = program.segment_marks
        moved: dict[int, tuple[int, ...]] = {}
        for index, segments in marks.last_arrival.items():
            for segment in segments:
                at = max(0, index - 1) if segment == self.segment else index
                moved[at] = (*moved.get(at, ()), segment)
        early = dataclasses.replace(marks, last_arrival=moved)
        return CompiledProgram(program.program, program.signature, program.bounds, early)


class StagingReused(Fault):
    """Staging memory is used again while its last message is copied back."""

    kind = LATE

    def channel(self, channel: bridge.DeviceChannel) -> None:
        for buffer in channel.pool._buffers:
            buffer.wait_idle = lambda: None  # type: ignore[method-assign]


class TensorLetGo(Fault):
    """The memory of a tensor that the script has freed is not kept until the result is in it."""

    kind = LATE

    def device(self, device: Any) -> None:
        device.keep = lambda tensor, stream: None


class PutOnFetchStream(Fault):
    """Results are copied on a stream that nobody waits for."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        def put(start: int, stop: int) -> None:
            with staged._runtime.use(staged._channel.fetch_stream):
                staged._runtime.copy(staged._elements[start:stop], staged._host[start:stop])

        staged.put = put


class ReadyOnOtherStream(Fault):
    """The call records its event on a stream other than the script's."""

    kind = EARLY

    def before_open(self, device: SimulatedDevice) -> Callable[[], object]:
        script, device.current = device.current, Stream(device, eager=True)
        return lambda: setattr(device, "current", script)


class FetchUnordered(Fault):
    """The copies to the host do not wait for the script's stream."""

    kind = EARLY

    def channel(self, channel: Any) -> None:
        channel.fetch_stream.wait_event = lambda event: None


class WaitUnordered(Fault):
    """The script's stream does not wait for the result."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        staged.order_stream = lambda: None


class FutureBeforeDone(Fault):
    """The future is resolved on a stream that does not hold the result."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        staged.result_stream = contextlib.nullcontext


class DoneTooEarly(Fault):
    """The event of the end is recorded before the last copy."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        fetch, event = staged.fetch, staged._done

        def record_first(segment: int, start: int, stop: int) -> None:
            if segment == 0:
                event.record(staged._channel.put_stream)
                event.record = lambda stream: None
            fetch(segment, start, stop)

        staged.fetch = record_first
