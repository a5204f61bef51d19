"""A connection to a host: turns of the threads that share it, and answers that come late."""

import shlex
import signal
import sys
import threading
import time

import pytest

from ringweave.platforms.hosts.host_list import THIS_MACHINE, HostSpec
from ringweave.platforms.hosts.ssh import HELLO, FairLock, HostError, SshConnection
from tests.polling import wait_until


def test_two_threads_that_ask_again_at_once_let_a_third_one_in() -> None:
    lock, is_over, taken = FairLock(), threading.Event(), []

    def take_again_and_again(name: str) -> None:
        while not is_over.is_set():
            with lock:
                taken.append(name)
                time.sleep(0.002)

    threads = [threading.Thread(target=take_again_and_again, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(taken) > 10)
    between = []
    for _ in range(20):
        before = len(taken)
        with lock:
            between.append(len(taken) - before)
        time.sleep(0.001)
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert sorted(between)[10] <= 2, "those that waited before it"
    assert {"a", "b"} == set(taken)


def test_who_is_interrupted_while_it_waits_leaves_the_lock_to_the_others() -> None:
    lock, has_lock, ends = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has_lock.set()
            ends.wait(60)

    def interrupt() -> None:
        wait_until(lambda: len(lock._waiting) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    holder = threading.Thread(target=hold)
    holder.start()
    assert has_lock.wait(60)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    interrupter.join(60)
    ends.set()
    holder.join(60)
    with lock:
        assert not lock._waiting


LATE = f"""
import json, sys, time
print({HELLO.decode()!r} + "{{}}", flush=True)
for line in sys.stdin:
    time.sleep(0.5)
    print(json.dumps({{"verb": json.loads(line)["verb"]}}), flush=True)
"""
"""The other end of a connection, on a busy machine."""


def test_a_late_answer_is_not_taken_for_that_of_the_next_call() -> None:
    here = HostSpec(node="here", destination=THIS_MACHINE, workers=1)
    connection = SshConnection(here, f"exec {shlex.join([sys.executable, '-c', LATE])}")
    try:
        assert connection.call("first") == {"verb": "first"}
        with pytest.raises(HostError, match="no answer in time"):
            connection.call("second", timeout_s=0.01)
        assert not connection.is_open
        with pytest.raises(HostError, match="host here"):
            connection.call("third")
    finally:
        connection.close()
