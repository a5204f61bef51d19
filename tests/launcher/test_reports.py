import signal

from ringweave.launcher.outcome import WorkerFailure, conclude_run, run_failure_text
from ringweave.launcher.workers import WorkerExit


def death(rank: int, how: str | int, *lines: str, stopped: bool = False) -> WorkerFailure:
    ended = WorkerExit(
        exit_code=how if isinstance(how, int) else None,
        signal_name=how if isinstance(how, str) else None,
        time_s=rank,
        was_stopped=stopped,
    )
    return WorkerFailure(global_rank=rank, node="a0", exit=ended, last_lines=lines)


def text(deaths: list[WorkerFailure], interrupts: tuple[signal.Signals, ...] = ()) -> str:
    return run_failure_text(conclude_run(deaths, interrupts), wall_s=12.34, log_pattern="runs/x/logs/rank-{rank}.log")


def test_a_good_end_is_silent() -> None:
    ending = conclude_run([], ())
    assert (ending.outcome, ending.exit_code, ending.cause) == ("done", 0, None)
    assert text([]) == ""


def test_the_first_cause_is_on_top() -> None:
    lines = [f"line {number}" for number in range(20)] + ["Traceback (most recent call last):", "  x", "ValueError: y"]
    deaths = [
        death(0, "SIGTERM", stopped=True),
        death(1, 1, *lines),
        death(2, 3, "z"),
        death(3, "SIGKILL", stopped=True),
    ]
    shown = "".join(f"    {line}\n" for line in lines[-15:])
    assert text(deaths) == (
        "ringweave: failed after 12.3 s: rank 1 on node a0 raised ValueError: y.\n"
        f"Last lines of runs/x/logs/rank-1.log:\n{shown}"
        "After it, rank 2 on node a0 ended with exit code 3.\n"
        "Ended by ringweave: rank 0, 3.\n"
    )
    assert conclude_run(deaths, ()).exit_code == 1


def test_signals_come_with_advice() -> None:
    assert "see `dmesg | grep -i oom`" in text([death(0, "SIGKILL")])
    assert "run with PYTHONFAULTHANDLER=1" in text([death(0, "SIGSEGV")])


def test_an_interrupt_is_no_failure_of_a_rank() -> None:
    ending = conclude_run([death(0, "SIGINT", stopped=True)], (signal.SIGINT, signal.SIGINT))
    assert (ending.outcome, ending.exit_code) == ("interrupted", 1)
    assert (
        text([death(0, "SIGINT", stopped=True)], (signal.SIGINT,)) == "ringweave: interrupted after 12.3 s by SIGINT.\n"
    )


def test_workers_that_got_the_same_signal_from_the_same_hand_are_no_cause() -> None:
    assert conclude_run([death(0, "SIGTERM")], (signal.SIGTERM,)).outcome == "interrupted"


def test_an_interrupt_after_a_failure_does_not_hide_it() -> None:
    ending = conclude_run([death(1, 1, "ValueError: y")], (signal.SIGINT,))
    assert (ending.outcome, ending.cause) == ("failed", "rank 1 on node a0 raised ValueError: y")
