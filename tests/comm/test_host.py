"""Failures of the native backend."""

from typing import Any

import pytest

from ringweave.comm.native_backend import NativeWork
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.errors import CommunicationError, PeerError


class Broken:
    """A work that fails as Gloo's do."""

    def wait(self) -> bool:
        raise RuntimeError("Connection closed by peer")


def test_an_error_keeps_the_cause_that_its_group_ended_for() -> None:
    seen: list[TransferFailedError] = []
    first = PeerError("allreduce #1: rank 3 does not answer")

    def explain(failure: TransferFailedError) -> CommunicationError:
        seen.append(failure)
        error = PeerError("barrier: this process group has failed before")
        error.__cause__ = first
        return error

    broken: Any = Broken()
    with pytest.raises(PeerError, match="barrier") as caught:
        NativeWork(broken, explain).wait()
    assert caught.value.__cause__ is first
    assert isinstance(seen[0].__cause__, RuntimeError)
