"""`ringweave run` with real workers that end badly, by real signals; nothing may be left."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from ringweave.launcher import guard

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WAIT = "print('up'); time.sleep(1000)"


def patient(**seconds: float) -> str:
    """`ringweave` that waits so long before harder measures; see `supervise.StopTimeouts`."""
    return f"""
import functools
from ringweave.cli import main
from ringweave.launcher import supervise
supervise.StopTimeouts = functools.partial(supervise.StopTimeouts, **{seconds})
main.main()
"""


def test_a_killed_worker_is_named_and_all_the_others_are_ended(start, script, all_gone) -> None:
    run = start("--workers", "3,1", script(WAIT))
    run.wait_printed("up", times=4)
    pids = run.pids()
    os.kill(pids[2], signal.SIGKILL)
    assert run.wait_ended() == 1
    report = run.stderr[run.stderr.index("ringweave: failed") :]
    assert "rank 2 on node node0 was killed by SIGKILL." in report.splitlines()[0]
    assert "Last lines of run/logs/rank-2.log:\n    up\nEnded by ringweave: rank 0, 1, 3.\n" in report
    assert run.record["outcome"] == "failed"
    assert run.record["cause"] == "rank 2 on node node0 was killed by SIGKILL"
    all_gone(list(pids.values()))


def test_an_exception_is_reported_before_those_that_followed_from_it(start, script) -> None:
    run = start(
        "--workers",
        "3",
        script("""
            import pathlib
            up, raised = pathlib.Path("up"), pathlib.Path("raised")

            def wait_for(path):
                while not path.exists():
                    time.sleep(0.01)

            if rank == 0:
                wait_for(up)
                raised.touch()
                raise ConnectionResetError("Connection reset by peer")
            if rank == 2:
                up.touch()
                wait_for(raised)
                time.sleep(0.15)
                raise KeyError("no such layer")
            time.sleep(1000)
        """),
        program=patient(grace_s=5.0),
    )
    assert run.wait_ended() == 1
    report = run.stderr[run.stderr.index("ringweave: failed") :]
    assert "rank 2 on node node0 raised KeyError: 'no such layer'." in report.splitlines()[0]
    assert "    KeyError: 'no such layer'\n" in report
    assert "After it, rank 0 on node node0 raised ConnectionResetError: Connection reset by peer.\n" in report
    assert "Ended by ringweave: rank 1.\n" in report


def test_an_exit_code_is_a_failure_too(start, script) -> None:
    run = start("--workers", "2", script("sys.exit(7 if rank else 0)"))
    assert run.wait_ended() == 1
    assert "rank 1 on node node0 ended with exit code 7." in run.stderr
    assert "(it printed nothing)" in run.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_all(start, script, all_gone, how: signal.Signals) -> None:
    run = start("--workers", "2", script(WAIT))
    run.wait_printed("up", times=2)
    run.process.send_signal(how)
    assert run.wait_ended() == 1
    assert f" s by {how.name}.\n" in run.stderr
    assert run.record["outcome"] == "interrupted"
    all_gone(list(run.pids().values()))


def test_a_worker_may_end_well_when_interrupted(start, script) -> None:
    run = start(
        script("signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0))); print('up'); time.sleep(99)"),
        program=patient(interrupt_s=1000.0),
    )
    run.wait_printed("up")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait_ended() == 1
    assert "[0] saved\n" in run.stdout
    assert " s by SIGTERM.\n" in run.stderr


def test_who_ignores_signals_is_killed(start, script, all_gone) -> None:
    run = start(
        "--workers",
        "2",
        script("""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            print('up')
            time.sleep(1000)
        """),
    )
    run.wait_printed("up", times=2)
    os.kill(run.pids()[1], signal.SIGKILL)
    assert run.wait_ended() == 1
    all_gone(list(run.pids().values()))


def test_a_second_interrupt_does_not_wait(start, script) -> None:
    run = start(
        script("signal.signal(signal.SIGINT, lambda *_: print('heard')); print('up')\nwhile True: time.sleep(9)"),
        program=patient(interrupt_s=1000.0),
    )
    run.wait_printed("up")
    run.process.send_signal(signal.SIGINT)
    run.wait_printed("heard")
    run.process.send_signal(signal.SIGINT)
    assert run.wait_ended() == 1


CHILDREN = """
    plain = subprocess.Popen(['sleep', '100'])
    apart = subprocess.Popen(['setsid', 'sleep', '100'])
    print('children', plain.pid, apart.pid, flush=True)
"""


def children(run) -> list[int]:
    return [int(word) for line in run.stdout.splitlines() if "children" in line for word in line.split()[2:]]


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_workers_leave_behind_is_ended(start, script, all_gone, end: str) -> None:
    run = start("--workers", "2", script(CHILDREN + f"    {end}"))
    assert run.wait_ended() == (0 if "exit" in end else 1), run.stderr
    assert len(children(run)) == 4
    all_gone(children(run))


def test_killing_ringweave_itself_leaves_nothing(start, script, all_gone) -> None:
    run = start(
        "--workers",
        "2",
        script("child = subprocess.Popen(['sleep', '100'])\nprint('children', child.pid); time.sleep(99)"),
    )
    run.wait_printed("children", times=2)
    run.process.kill()
    run.wait_ended()
    all_gone([*run.pids().values(), *children(run)])


def test_no_port_is_left(start, script, all_gone) -> None:
    listen = "import socket; s = socket.socket(); s.bind(('127.0.0.1', int(os.environ['MASTER_PORT']))); s.listen()"
    run = start(
        "--workers", "2", script(f"if rank == 0: {listen}\nprint('up', os.environ['MASTER_PORT']); time.sleep(99)")
    )
    run.wait_printed("up", times=2)
    port = int(run.stdout.split()[2])
    run.process.send_signal(signal.SIGTERM)
    assert run.wait_ended() == 1
    assert f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text()


def test_a_guard_forgets_sessions_of_which_no_process_is_left() -> None:
    """The kernel may give their numbers to other programs, in the weeks until the launcher is killed."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as alive:
        ended = subprocess.Popen(["true"], start_new_session=True)
        ended.wait()
        words = [f"{alive.pid}\n", f"{ended.pid}\n", f"-{ended.pid}\n", f"-{alive.pid}\n"]
        assert guard.read_sessions(words) == {alive.pid}, (
            "a child of a worker that has ended may be left in its session"
        )
        assert guard.read_sessions([*words, "done"]) == set()
        alive.kill()
