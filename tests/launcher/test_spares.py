"""Spares: real processes that fork workers or become one, without slow imports unless a test is about them."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave import environment, lab, topology
from ringweave.errors import UsageError
from ringweave.launcher import processes, spares
from ringweave.launcher.node_context import LabContext, NodeEntry
from ringweave.launcher.spares import ForkedProcess, Spare, SparePool, SpareRules
from ringweave.launcher.workers import WorkerProgram, WorkerSpec
from tests.launcher.conftest import is_gone
from tests.polling import wait_until

SLOT = WorkerSpec(global_rank=1, local_rank=1, node="a0", environ={})
HERE = NodeEntry()
IMPORTS_ITSELF = 'import os\nos.environ.setdefault("OMP_NUM_THREADS", "1")\n'
"""Beginning of a script whose spare imports nothing before."""
WITH_A_THREAD = """
import runpy, sys, threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
del sys.argv[0]
kept = runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program that runs a spare with one more thread, so that it cannot be forked."""
DESCRIBES = """
    import json, sys
    own = {name: os.environ.get(name) for name in ("RANK", "RINGWEAVE_MEMBER", "LEFT_OVER", "LONG")}
    fd = int(os.environ["RINGWEAVE_CREDENTIALS"].removeprefix("fd:"))
    group = "/proc/self/autogroup"
    nice = os.getpriority(os.PRIO_PROCESS, 0), open(group).read().split()[-1] if os.path.exists(group) else "0"
    loaded = [name for name in ("torch", "ringweave.launcher.spares") if name in sys.modules]
    main = __name__, __file__, sys.modules["__main__"].__file__
    place = sys.argv, sys.path[0], os.getcwd()
    print(json.dumps([os.getpid(), own, os.read(fd, 99).decode(), nice, loaded, main, place]), flush=True)
    raise SystemExit(3)
"""


class Given:
    """A pool of spares for a script, and all that it has told."""

    def __init__(
        self, script: Path, num_spares: int = 1, node: NodeEntry = HERE, *arguments: str, program: str = ""
    ) -> None:
        self.ready, self.given_up, self.started = list[Spare](), list[str](), list[subprocess.Popen[bytes]]()
        self.is_over, self.taken = False, list[Spare]()
        rules = SpareRules(
            num_spares=num_spares,
            is_elastic=True,
            is_over=lambda: self.is_over,
            node_entry=lambda worker: node,
            on_ready=self.ready.append,
            on_give_up=self.given_up.append,
        )
        self._program, self.folder = program, script.parent
        command = (sys.executable, str(script), *arguments)
        self.pool = SparePool(rules, command, self.environ(), self._start, time.monotonic)

    @staticmethod
    def environ(**changes: str) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "RANK": "0", environment.MEMBER: "0.0", **changes}

    def _start(
        self, command: Sequence[str], environ: Mapping[str, str], inherited: Sequence[int]
    ) -> "subprocess.Popen[bytes]":
        if self._program:
            command = [sys.executable, "-c", self._program, *command[1:]]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            pass_fds=inherited,
            start_new_session=True,
            cwd=self.folder,
        )
        self.started.append(process)
        return process

    def refill_until(self, claim: Callable[[], bool], what: str) -> None:
        def has_come() -> bool:
            self.pool.refill()
            return claim()

        wait_until(has_come, what)

    def end(self) -> None:
        self.pool.close()
        for process in self.started:
            process.kill()
            process.communicate()
        for each in self.taken:
            for pipe in (each.process.stdout, each.process.stderr):
                assert pipe is not None
                pipe.close()

    def take(self, credentials_fd: int | None = None, command: Sequence[str] = ("false",), **environ: str):
        found = self.pool.take(SLOT, self.environ(**environ), command, credentials_fd)
        self.taken += [found] if found else []
        return found


@pytest.fixture
def given(tmp_path: Path) -> Iterator[Callable[..., Given]]:
    made: list[Given] = []
    processes.adopt_orphans()  # as a launcher does, to be the parent of what a fork server forks

    def make(text: str, *args, **options) -> Given:
        script = tmp_path / "train.py"
        script.write_text(text)
        made.append(Given(script, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def credentials(text: str) -> int:
    reads, writes = os.pipe()
    os.write(writes, text.encode())
    os.close(writes)
    return reads


@pytest.mark.parametrize("program", ["", WITH_A_THREAD], ids=["forked", "with a thread"])
def test_a_worker_of_a_spare_is_as_a_new_process_would_be(given, tmp_path: Path, program: str) -> None:
    pool = given(IMPORTS_ITSELF + textwrap.dedent(DESCRIBES), 1, HERE, "--epochs", "3", program=program)
    pool.refill_until(lambda: len(pool.ready) == 1, "a spare that is ready")
    secret = credentials("secret")
    long = "x" * 100_000  # more than a socket takes at once
    assert pool.take(secret, LONG=long) is None, "it has started without that variable, which may matter on import"
    taken = pool.take(secret, RANK="1", RINGWEAVE_MEMBER="1.4")
    os.close(secret)
    assert pool.ready[0].can_fork is not bool(program)
    assert (taken is pool.ready[0]) is bool(program)
    said = output_of(taken)
    pid, own, told, nice, loaded, main, place = json.loads(said)
    assert (pid, taken.process.returncode) == (taken.process.pid, 3)
    assert own == {"RANK": "1", "RINGWEAVE_MEMBER": "1.4", "LEFT_OVER": None, "LONG": None}
    assert told == "secret"
    assert nice == [os.getpriority(os.PRIO_PROCESS, 0), "0"], "it has a worker's priority again"
    assert loaded == [], "neither what the script has not imported nor the spare's own program"
    script = str(tmp_path / "train.py")
    assert main == ["__main__", script, script]
    assert place == [[script, "--epochs", "3"], str(tmp_path), str(tmp_path)]


def output_of(taken: Spare) -> bytes:
    """All that a worker writes to its standard output; it has ended then."""
    assert taken.process.stdout is not None
    said = taken.process.stdout.read()
    taken.process.wait(timeout=300)
    return said


def test_a_fork_server_forks_any_number_of_workers_as_children_of_the_launcher(given) -> None:
    pool = given(
        IMPORTS_ITSELF + "import random\nprint(os.getppid(), os.getsid(0), random.random(), flush=True)\nos.abort()", 3
    )
    pool.refill_until(lambda: len(pool.ready) == 1, "a fork server")
    for _ in range(3):
        pool.pool.refill()
    assert len(pool.started) == 1, "one is enough, of three spares that were asked for"
    taken = [pool.take() for _ in range(3)]
    said = [output_of(each).split() for each in taken]
    assert [int(parent) for parent, _, _ in said] == [os.getpid()] * 3
    assert [int(session) for _, session, _ in said] == [each.process.pid for each in taken]
    assert len({number for _, _, number in said}) == 3
    assert [each.process.returncode for each in taken] == [-signal.SIGABRT] * 3
    assert pool.started[0].poll() is None


def test_a_fork_server_that_does_not_answer_is_ended_and_replaced(given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_FORK_TIMEOUT_S", 0.05)
    pool = given(IMPORTS_ITSELF + "raise SystemExit(5)")
    pool.refill_until(lambda: len(pool.ready) == 1, "a fork server")
    pool.started[0].send_signal(signal.SIGSTOP)
    assert pool.take() is None
    assert pool.started[0].returncode == -signal.SIGKILL
    monkeypatch.setattr(spares, "_FORK_TIMEOUT_S", 60.0)
    pool.refill_until(lambda: len(pool.ready) == 2, "another one")
    assert pool.take().process.wait(timeout=300) == 5


def test_the_wait_for_the_first_spare_ends_with_its_death_and_when_nothing_is_wanted_any_more(given) -> None:
    pool = given("", program="import sys; sys.exit('no room')")
    pool.pool.start_first()
    pool.pool.wait_first()
    assert (pool.ready, pool.take()) == ([], None)
    pool = given("", program="import time; time.sleep(600)")
    pool.is_over = True
    pool.pool.start_first()
    pool.pool.wait_first()
    assert (pool.ready, pool.take()) == ([], None)
    pool = given(IMPORTS_ITSELF)
    pool.pool.start_first()
    pool.pool.wait_first()
    assert (len(pool.ready), pool.take().process.wait(timeout=300)) == (1, 0)


def test_a_traceback_begins_in_the_script(given) -> None:
    pool = given(IMPORTS_ITSELF + "def fail():\n    1 / 0\nfail()\n")
    pool.refill_until(lambda: len(pool.ready) == 1, "a fork server")
    taken = pool.take()
    assert taken.process.stderr is not None
    said = taken.process.stderr.read().decode()
    assert [line.split(", ")[2] for line in said.splitlines() if line.startswith("  File")] == [
        "in <module>",
        "in fail",
    ]
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("ZeroDivisionError: division by zero\n")
    assert taken.process.wait(timeout=300) == 1


def test_a_forked_worker_ends_with_its_launcher(given, tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(IMPORTS_ITSELF + "import time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    launches = f"""
        import os, signal, sys, time
        from pathlib import Path
        from tests.launcher import test_spares
        from ringweave.launcher import processes
        processes.adopt_orphans()
        given = test_spares.Given(Path({str(script)!r}))
        given.refill_until(lambda: len(given.ready) == 1, "a fork server")
        print(given.take().process.stdout.readline().decode(), given.started[0].pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", textwrap.dedent(launches)]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    worker, server = map(int, ended.stdout.split())
    wait_until(lambda: is_gone(worker) and is_gone(server), "their end")


@pytest.mark.parametrize(
    ("source", "gains"),
    [
        ("import torch", True),
        ("import os, sys\nfrom pathlib import Path", False),
        ("def train():\n    import numpy", True),
        ("from .model import Net", True),
        ("import torch\nimport os\nos.environ['OMP_NUM_THREADS'] = '2'", False),
        ("this is no Python", False),
        ("", True),
    ],
)
def test_programs_that_gain_from_a_fork_server(tmp_path: Path, source: str, gains: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    program = WorkerProgram(target=str(script), arguments=("--epochs", "3"))
    assert spares.gains_from_fork_server(program, {}) is gains
    assert not spares.gains_from_fork_server(program, {"RINGWEAVE_START_METHOD": "spawn"})


def test_modules_gain_from_a_fork_server_and_commands_do_not() -> None:
    assert spares.gains_from_fork_server(WorkerProgram(target="some.package", is_module=True), {})
    assert not spares.gains_from_fork_server(WorkerProgram(target="hostname", is_command=True), {})


def test_another_start_method_is_refused() -> None:
    text = "RINGWEAVE_START_METHOD: 'thread', expected fork or spawn. Correct or unset it"
    with pytest.raises(UsageError, match=re.escape(text)):
        spares.gains_from_fork_server(WorkerProgram(target="x.py"), {"RINGWEAVE_START_METHOD": "thread"})


def test_one_spare_after_another_is_started_and_the_one_that_is_taken_is_replaced(given) -> None:
    pool = given(IMPORTS_ITSELF, 2, program=WITH_A_THREAD)
    pool.refill_until(lambda: len(pool.ready) == 2, "two spares")
    for _ in range(5):
        pool.pool.refill()
    assert len(pool.started) == 2
    taken = pool.take()
    assert taken is pool.ready[0]
    assert taken.process.wait(timeout=300) == 0
    pool.refill_until(lambda: len(pool.ready) == 3, "a third one")
    pool.pool.close()
    pool.pool.refill()
    assert {process.returncode for process in pool.started} <= {0, -signal.SIGKILL}, "one may see first that it may go"
    assert (len(pool.started), pool.take()) == (3, None)


def test_a_spare_ends_with_the_process_that_keeps_it(given) -> None:
    pool = given(IMPORTS_ITSELF)
    pool.refill_until(lambda: len(pool.ready) == 1, "a spare")
    pool.ready[0].channel.close()
    wait_until(lambda: is_gone(pool.started[0].pid), "its end")
    assert pool.started[0].wait() == 0


def test_spares_that_end_are_given_up_after_the_third_and_the_reason_is_said(given) -> None:
    pool = given("", program="import sys; sys.exit('no room')")
    pool.refill_until(lambda: bool(pool.given_up), "the end of the attempts")
    assert pool.given_up == ["no more spares are started: 3 of them ended, the last with: no room"]
    assert len(pool.started) == 3
    assert pool.take() is None


@pytest.mark.parametrize("program", ["", WITH_A_THREAD], ids=["forked", "with a thread"])
def test_a_spare_that_cannot_enter_its_node_becomes_the_worker_by_its_command(given, program: str) -> None:
    pool = given(IMPORTS_ITSELF, 1, NodeEntry(namespaces=("/nowhere/net",)), program=program)
    pool.refill_until(lambda: len(pool.ready) == 1, "a spare")
    secret = credentials("secret")
    command = ("/bin/sh", "-c", "cat <&${RINGWEAVE_CREDENTIALS#fd:}; echo; echo $RANK $$")
    taken = pool.take(secret, command, RANK="7")
    os.close(secret)
    assert output_of(taken).decode().split() == ["secret", "7", str(taken.process.pid)]


def test_what_the_script_imports_first_is_imported_before_and_the_users_own_modules_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "PRELOADED_MODULES", ())
    monkeypatch.setattr(spares, "_PRELOADED_PACKAGES", set())
    (tmp_path / "own_module.py").write_text("raise SystemExit('a user\\'s module was run')\n")
    (tmp_path / "train.py").write_text(
        "import own_module, no_such_module, colorsys\nfrom wsgiref import util, nothing\n"
    )
    monkeypatch.setattr(sys, "path", ["replaced", *sys.path[1:]])
    for name in ("colorsys", "wsgiref", "wsgiref.util"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spares._preload([str(tmp_path / "train.py")])
    assert {"colorsys", "wsgiref.util"} <= sys.modules.keys()
    assert "own_module" not in sys.modules


@pytest.mark.parametrize(
    ("source", "imports", "is_harmless"),
    [
        ("", [], True),
        ("this is no Python", [], True),
        (
            '"""Text."""\nimport a.b, c as d\nfrom e.f import g, h\nfrom . import i',
            ["a.b", "c", "e.f:g", "e.f:h"],
            True,
        ),
        ("import a\nSIZE = 3\nrank = int(os.environ['RANK'])\nimport b", ["a", "b"], True),
        ("import a\nos.environ['NCCL_DEBUG'] = 'INFO'\nimport b", ["a"], True),
        ("import a\nos.environ['OMP_NUM_THREADS'] = '4'\nimport b", ["a"], False),
        ("import a\nos.environ.setdefault('CUDA_VISIBLE_DEVICES', '0')", ["a"], False),
        ("import a\nos.putenv('MKL_NUM_THREADS', '1')", ["a"], False),
        ("import a\nos.environ |= {'TORCH_LOGS': 'all'}", ["a"], False),
        ("import a\nif True:\n    del os.environ['OMP_NUM_THREADS']", ["a"], False),
        ("import a\ndef f():\n    os.environ['OMP_NUM_THREADS'] = '4'\nimport b", ["a", "b"], True),
    ],
)
def test_the_first_imports_of_a_script(source: str, imports: list[str], is_harmless: bool) -> None:
    found, may_come_before = spares.script_imports(source.encode())
    assert [f"{module}:{name}" if name else module for module, name in found] == imports
    assert may_come_before is is_harmless


@pytest.mark.thorough
@pytest.mark.slow
def test_all_that_spares_import_is_there(given) -> None:
    told = "import sys, ringweave\nprint(*(name for name in sys.modules), sep=chr(10), flush=True)\n"
    pool = given(told)
    pool.refill_until(lambda: len(pool.ready) == 1, "a spare that has imported torch")
    taken = pool.take()
    assert {*spares.PRELOADED_MODULES, *spares._PREPARED_MODULES} <= set(output_of(taken).decode().split())
    assert isinstance(taken.process, ForkedProcess), "torch starts no thread on import that outlives a fork"
    assert taken.import_s > 0


PLACE = """
import json, os, socket, threading
place = [os.stat(f"/proc/thread-self/ns/{kind}").st_ino for kind in ("net", "uts", "mnt")]
also = [socket.gethostname(), open("/proc/self/cgroup").read(), os.getcwd(), open("/etc/hosts").read()]
print(json.dumps([*place, *also]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("program", [pytest.param(WITH_A_THREAD, id="with a thread"), pytest.param("", id="forked")])
def test_a_spare_enters_the_node_of_its_slot_in_a_lab(given, lab_name: str, tmp_path: Path, program: str) -> None:
    nodes = "name: pair\nnodes:\n  - {name: a, nic: 200Mbit/s, devices: 2}\n  - {name: b, nic: 200Mbit/s, devices: 1}\n"
    context = LabContext(lab.up(topology.loads(nodes), lab_name, "always"))
    worker = replace(SLOT, node="a")
    pool = given(IMPORTS_ITSELF + PLACE, 1, context.node_entry(worker), program=program)
    pool.refill_until(lambda: len(pool.ready) == 1, "a spare")
    said = output_of(pool.take())
    command = context.wrap_worker_command(worker, [sys.executable, str(tmp_path / "train.py")])
    fresh = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    assert json.loads(said) == json.loads(fresh.stdout)
    assert json.loads(said)[3] == "a"
