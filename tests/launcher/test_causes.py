import itertools

import pytest

from ringweave.launcher.outcome import WorkerFailure, conclude_run, find_exception, first_cause, run_failure_text
from ringweave.launcher.workers import WorkerExit

TRACEBACK = "Traceback (most recent call last):"


def death(rank: int, how: str | int = 1, *said: str, time_s: float = 1.0, stopped: bool = False) -> WorkerFailure:
    """`how`: a signal's name or an exit code; `said`: what follows a traceback in its log."""
    lines = (TRACEBACK, '  File "x.py", line 1, in <module>', *said) if said else ("epoch 1",)
    ended = WorkerExit(
        exit_code=how if isinstance(how, int) else None,
        signal_name=how if isinstance(how, str) else None,
        time_s=time_s,
        was_stopped=stopped,
    )
    return WorkerFailure(global_rank=rank, node="a0", exit=ended, last_lines=lines)


def cause(*deaths: WorkerFailure) -> int | None:
    """The rank of the first cause, whatever the order in which the deaths are listed."""
    found = {getattr(first_cause(order), "global_rank", None) for order in itertools.permutations(deaths)}
    assert len(found) == 1
    return found.pop()


def test_nobody_died() -> None:
    assert first_cause([]) is None


def test_ends_that_are_good_or_that_we_brought_about_are_no_cause() -> None:
    assert cause(death(0, 0), death(1, "SIGTERM", stopped=True), death(2, 1, "ValueError: x", stopped=True)) is None


def test_a_signal_beats_an_earlier_exception() -> None:
    assert cause(death(0, 1, "ValueError: x", time_s=0.1), death(1, "SIGKILL", time_s=0.4)) == 1


def test_a_signal_that_we_sent_does_not() -> None:
    assert cause(death(0, 1, "ValueError: x", time_s=9), death(1, "SIGTERM", time_s=0.4, stopped=True)) == 0


def test_of_two_signals_the_earlier_counts() -> None:
    assert cause(death(0, "SIGSEGV", time_s=0.2), death(1, "SIGKILL", time_s=0.1)) == 1


@pytest.mark.parametrize(
    "complaint",
    [
        "ringweave.errors.PeerError: rank 2 on node a1 closed its connection",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistStoreError: Timed out waiting for clients",
        "RuntimeError: Socket Timeout",
    ],
)
def test_who_complains_of_a_peer_is_not_the_cause(complaint: str) -> None:
    assert cause(death(0, 1, complaint, time_s=0.1), death(1, 1, "ValueError: x", time_s=0.4)) == 1
    assert cause(death(0, 1, complaint, time_s=0.1), death(1, 3, time_s=0.4)) == 1
    assert cause(death(0, 1, complaint, time_s=0.2), death(1, 1, complaint, time_s=0.1)) == 1


@pytest.mark.parametrize(
    "consequence",
    [
        "ringweave.errors.MembershipError: job is over: no worker is left that has the parameters",
        "ringweave.errors.CapacityError: memory of the workers: 2 of them",
    ],
)
def test_what_follows_the_end_of_others_is_not_the_cause(consequence: str) -> None:
    assert cause(death(0, 1, consequence, time_s=0.1), death(1, 1, "TypeError: x", time_s=0.4)) == 1
    assert cause(death(0, 1, consequence, time_s=0.1), death(1, 3, time_s=0.4)) == 1
    assert cause(death(0, 1, consequence, time_s=0.2), death(1, 1, consequence, time_s=0.1)) == 1
    assert cause(death(0, 1, f"ValueError: {consequence}", time_s=0.1), death(1, 1, "TypeError: x", time_s=0.4)) == 0


def test_tracebacks_as_torch_prints_them_are_understood() -> None:
    lost = WorkerFailure(
        global_rank=0,
        node="a0",
        exit=WorkerExit(exit_code=1, signal_name=None, time_s=0.1, was_stopped=False),
        last_lines=(f"[rank0]: {TRACEBACK}", "[rank0]:   x", "[rank0]: RuntimeError: Connection reset by peer"),
    )
    assert cause(lost, death(1, 1, "ValueError: x", time_s=0.4)) == 1


def test_an_abort_that_complains_of_a_peer_is_not_the_cause_either() -> None:
    said = "terminate called after throwing an instance of 'gloo::IoException'", "what(): Connection closed by peer"
    assert cause(death(0, "SIGABRT", *said, time_s=0.1), death(1, 1, "ValueError: x", time_s=0.4)) == 1
    assert cause(death(0, "SIGABRT", "Assertion failed", time_s=0.4), death(1, 1, "ValueError: x", time_s=0.1)) == 0


def test_a_word_about_peers_elsewhere_in_the_log_is_no_complaint() -> None:
    said = ("ValueError: x", "WARNING: Connection closed by peer")
    assert cause(death(0, 1, *said, time_s=0.1), death(1, 1, "KeyError: 'y'", time_s=0.2)) == 0


def test_then_the_earliest_counts_and_then_the_lowest_rank() -> None:
    assert cause(death(0, 1, "ValueError: x", time_s=0.3), death(1, 1, "ValueError: y", time_s=0.2)) == 1
    assert cause(death(2, 1, "ValueError: x"), death(1, 1, "ValueError: y"), death(3, 2)) == 1


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        (["all is well", "Done: 3 errors"], None),
        ([TRACEBACK, '  File "x", line 1', "ValueError: boom"], "ValueError: boom"),
        ([TRACEBACK, '  File "x", line 1', "KeyboardInterrupt"], "KeyboardInterrupt"),
        ([TRACEBACK, "  x", "my.module.Oops: sorry", "INFO: bye"], "my.module.Oops: sorry"),
        ([TRACEBACK, "  x", "KeyError: 1", "", "During handling:", "", TRACEBACK, "  y", "OSError: 2"], "OSError: 2"),
        ([TRACEBACK, "  x", "INFO: from another thread", "ValueError: real"], "ValueError: real"),
        (['  File "x.py", line 1', "    x = = 1", "SyntaxError: invalid syntax"], "SyntaxError: invalid syntax"),
        (
            ["  + Exception Group " + TRACEBACK, "  | x", "ExceptionGroup: two (2 sub-exceptions)"],
            "ExceptionGroup: two (2 sub-exceptions)",
        ),
        (["[rank3]: " + TRACEBACK, "[rank3]:   x", "[rank3]: ValueError: y", "bye"], "ValueError: y"),
        (["ValueError: first line", "second line of its message"], "ValueError: first line"),
    ],
)
def test_the_exception_in_a_log(lines: list[str], expected: str | None) -> None:
    assert find_exception(lines) == expected


def test_reasons_in_words() -> None:
    assert death(0, "SIGKILL").reason == "was killed by SIGKILL"
    assert death(0, 1, "ValueError: x").reason == "raised ValueError: x"
    assert death(0, 7).reason == "ended with exit code 7"


def test_a_rank_that_gloo_has_ended_for_another_ones_shape_is_told_so() -> None:
    """The line is Gloo's in torch 2.13, for 200 numbers in an allreduce of 100 bytes."""
    line = (
        "  what():  [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
        "op.preamble.length <= op.nbytes. 200 vs 100. Received data size doesn't match expected size."
    )
    ended = WorkerExit(exit_code=None, signal_name="SIGABRT", time_s=1.0, was_stopped=False)
    failed = WorkerFailure(global_rank=0, node="a0", exit=ended, last_lines=("terminate called", line))
    other = death(1, 1, "ringweave.errors.PeerError: rank 0 (node a0) is gone", time_s=0.9)
    text = run_failure_text(conclude_run([other, failed], []), wall_s=2.0, log_pattern="logs/rank-{rank}.log")
    assert text.startswith("ringweave: failed after 2.0 s: rank 0 on node a0 ")
    assert (
        "Another rank sent it 200 bytes in a collective of Gloo, expected 100: ranks call it with different shapes. "
        "With TORCH_DISTRIBUTED_DEBUG=DETAIL the error names the rank and both shapes.\n" in text
    )
