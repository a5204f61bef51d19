"""Elastic runs that are asked to end, whose members have their data loaded by processes of their own."""

import signal

import psutil
import pytest

from ringweave.training.checkpoints import store
from tests.launcher.small_training import epoch, prepared

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

PREPARED = prepared(num_samples=192).replace("shuffle=False", "shuffle=False, num_workers=2")
SAVED = f"""{PREPARED}
checkpoints = ringweave.Checkpoints("checkpoints", model=model, optimizer=optimizer, loader=loader)
done = checkpoints.load()
for number in loader.epochs(100000):
{epoch(indent=4, also='done += 1; print("done", done, flush=True); time.sleep(0.05)')}
"""


HANDLER = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'asked to leave\\n'), loader.leave()))\n"
"""Workers get SIGTERM, whatever `ringweave run` gets. It does not print, which the script may be about."""


@pytest.mark.parametrize(
    ("how", "handler"), [(signal.SIGINT, ""), pytest.param(signal.SIGTERM, HANDLER, marks=pytest.mark.thorough)]
)
def test_whoever_ends_a_run_finds_the_state_after_the_last_train_step(
    start, script, how: signal.Signals, handler: str
) -> None:
    """On a terminal that is Ctrl-C. A loader whose processes were ended as well failed in the midst of a step."""
    text = SAVED.replace("done = checkpoints.load()", f"{handler}done = checkpoints.load()")
    run = start("--elastic", "1:2", "--workers", "2", "--mode", "sync", script(text))
    run.wait_printed("done 8", times=2)
    assert all(psutil.Process(pid).children() for pid in run.pids().values()), "processes that load"
    run.process.send_signal(how)
    assert run.wait_ended() == 1
    (saved,) = store.list_checkpoints(run.folder / "checkpoints")
    assert run.stdout.count(f"done {saved.train_step}\n") == 2, "the last one that counts"
    assert f"done {saved.train_step + 1}\n" not in run.stdout
    assert "DataLoader worker" not in run.stdout + run.stderr
    assert run.stdout.count("asked to leave") == (2 if handler else 0)
    assert [(event["exit_code"], event["signal"]) for event in run.events("worker_exited")] == [(143, None)] * 2
    assert run.record["cause"] == f"interrupted by {how.name}"


PATIENT = """
from ringweave.cli.main import main
from ringweave.launcher import supervise
supervise.MEMBER_INTERRUPT_TIMEOUT_S = 1000.0
main()
"""


def test_who_interrupts_twice_does_not_wait(start, script) -> None:
    waits = "signal.signal(signal.SIGTERM, lambda *_: print('heard'))\nprint('up')\nwhile True: time.sleep(9)"
    run = start("--elastic", "1:1", script(waits), program=PATIENT)
    run.wait_printed("up")
    run.process.send_signal(signal.SIGINT)
    run.wait_printed("heard")
    run.process.send_signal(signal.SIGINT)
    assert run.wait_ended() == 1
    assert run.record["cause"] == "interrupted by SIGINT"
