"""Faults of the bridge that tests plant: each breaks one rule that keeps the copies of both sides in order."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from ringweave.comm import bridge
from ringweave.comm.device_regions import overlaps
from ringweave.comm.engine.engine import CompiledProgram
from tests.comm.bridge.simulated_device import EARLY, LATE, SimulatedDevice, Stream
from tests.comm.bridge.worlds import Case, Fault


class WaitDropped(Fault):
    """The program does not wait for some segments."""

    kind = LATE

    def __init__(self, *segments: int) -> None:
        self.segments = segments

    def opened(self, staged: Any, case: Case) -> None:
        wait = staged.wait_fetched
        staged.wait_fetched = lambda segment: None if segment in self.segments else wait(segment)


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
                for flat, first, until in overlaps(staged._outputs, start, stop):
                    staged._runtime.copy(flat.part(first, until), staged._host[first:until])

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
        wait_ready, event = staged.wait_ready, staged._done

        def record_first() -> None:
            event.record(staged._channel.put_stream)
            event.record = lambda stream: None
            wait_ready()

        staged.wait_ready = record_first


class WordBeforeTheLastCopy(Fault):
    """The word is written when the copies are enqueued, and not when they are done."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        staged._done.synchronize = lambda: None


class WordAtTheBeginning(Fault):
    """The word is written before the program has run."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        wait_ready = staged.wait_ready

        def write_first() -> None:
            wait_ready()
            staged._gate.let_pass(staged._number)

        staged.wait_ready = write_first


class WordOfTheOneBefore(Fault):
    """The stream waits for the collective before this one."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        order_ahead = staged.order_ahead

        def order_too_little() -> bool:
            staged._number -= 1
            is_ordered = order_ahead()
            staged._number += 1
            return is_ordered

        staged.order_ahead = order_too_little


class AheadOnOtherStream(Fault):
    """Another stream than the script's waits for the word."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        order_ahead, device = staged.order_ahead, staged._runtime

        def order_elsewhere() -> bool:
            with device.use(device.callbacks):
                return order_ahead()

        staged.order_ahead = order_elsewhere


class OneNumberForTwo(Fault):
    """Collectives take the number of the first, so the word lets all pass with it."""

    kind = LATE

    def opened(self, staged: Any, case: Case) -> None:
        staged._gate._num_reserved = staged._number = 1
