"""Scripts as the workers of elastic runs start them, each in a process of its own."""

import inspect
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from ringweave.launcher import entry
from ringweave.launcher.workers import WorkerProgram
from ringweave.training.elastic import member_details

EXITS = "".join(map(inspect.getsource, (member_details.record_exit_failures, member_details.script_has_failed)))
"""The functions alone: what their module imports takes seconds."""
ENDS = f"""
import atexit, builtins, sys
from typing import Any, NoReturn
{EXITS}
record_exit_failures()
atexit.register(lambda: print("failed" if script_has_failed() else "through", flush=True))
"""
DESCRIBES = """
    import inspect, json, os, pickle, sys
    class Thing:
        pass
    def source():
        return inspect.getsource(Thing)
    same = pickle.loads(pickle.dumps(Thing())).__class__ is Thing
    print(json.dumps([__name__, __file__, sys.argv, sys.path[0], same, source(), sys.modules["__main__"].__file__]))
"""


def run(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, cwd=cwd)


def through_entry(program: WorkerProgram) -> tuple[str, ...]:
    return program.argv(sys.executable, entry=entry.__file__)


@pytest.mark.parametrize(
    ("how", "exit_code", "said"),
    [
        ("", 0, "through"),
        ("raise SystemExit", 0, "through"),
        ("raise SystemExit(0)", 0, "through"),
        ("raise SystemExit(print())", 0, "through"),
        ("exit()", 0, "through"),
        ("sys.exit(0)", 0, "through"),
        ("raise SystemExit(1)", 1, "failed"),
        ("raise SystemExit('no data')", 1, "failed"),
        ("(lambda: exit(3))()", 3, "failed"),
        ("quit(1)", 1, "failed"),
        ("builtins.exit(1)", 1, "failed"),
        ("sys.exit(1)", 1, "failed"),
        ("{}['x']", 1, "failed"),
    ],
)
def test_a_script_that_ends_with_a_status_is_not_taken_for_one_that_is_through(
    tmp_path: Path, how: str, exit_code: int, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{ENDS}{how}\n")
    ended = run(*through_entry(WorkerProgram(target=str(script))))
    assert (ended.returncode, ended.stdout.split()[-1]) == (exit_code, said), ended.stderr


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_finds_what_it_finds_without_the_entry(tmp_path: Path, is_module: bool) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(DESCRIBES))
    program = WorkerProgram(
        target="train" if is_module else "train.py", arguments=("--epochs", "3"), is_module=is_module
    )
    plain = run(*program.argv(sys.executable), cwd=tmp_path)
    found = run(*through_entry(program), cwd=tmp_path)
    assert plain.returncode == found.returncode == 0, found.stderr
    there, here = json.loads(plain.stdout), json.loads(found.stdout)
    assert here[0] == "__main__"
    assert here[3:] == there[3:]
    assert here[1] == there[1]
    assert here[2][1:] == ["--epochs", "3"]


def test_other_kinds_of_programs_run_as_well(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "train.pyz", "w") as packed:
        packed.writestr("__main__.py", "import sys\nprint(__name__, sys.argv[1:])\nraise SystemExit(4)\n")
    ended = run(*through_entry(WorkerProgram(target="train.pyz", arguments=("a",))), cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (4, "__main__ ['a']\n")
    assert WorkerProgram(target="hostname", is_command=True).argv("python", entry="entry.py") == ("hostname",)


def test_an_exception_ends_it_with_its_own_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def step():\n    raise KeyError('label')\nstep()\n")
    ended = run(*through_entry(WorkerProgram(target=str(script))))
    assert ended.returncode == 1
    assert f'File "{script}", line 2, in step' in ended.stderr
    assert ended.stderr.splitlines()[-1] == "KeyError: 'label'"
