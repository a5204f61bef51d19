"""No verb shows a traceback for what a user, a disk or a busy machine brings about: all verbs, one condition at a time.

A condition is a process of its own, which changes its limits or its folder and then runs every verb.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringweave.cli import main
from ringweave.cli.main import VERBS
from ringweave.platforms.hosts import run_entry
from ringweave.platforms.hosts.host_list import HostSpec
from ringweave.platforms.hosts.run_entry import HostsOptions, KnownRun
from tests.page import synthetic

CLUSTER = Path(__file__).parents[2] / "examples" / "clusters" / "unequal-nics.yaml"
ELSEWHERE = "203.0.113.1"
"""Address of no machine, by RFC 5737."""
COMMANDS: list[list[str]] = [
    ["run", "--workers", "1", "--run-dir", "run", "job.py"],
    ["run", "--workers", "2", "--run-dir", "run", "--log-max-size", "64KiB", "--log-max-files", "2", "job.py"],
    *(["attach", "nothing"], ["attach", "run"], ["join", "nowhere"], ["join", f"127.0.0.1:1#{'A' * 43}"]),
    *(["scale", "run", "--workers", "2"], ["lab", "status"], ["lab", "down", "nothing"]),
    *(["discover", "--write", "found.yaml"], ["plan", str(CLUSTER)], ["plan", "--run", "run"]),
    *(["cost", "--figure", "latency"], ["simulate", str(CLUSTER), "--trace", "trace.json"]),
    ["partition", "--work", "4,1,2,2", "--capability", "2,1", "--activation", "4,1,9,2", "--bandwidth", "2"],
    ["split", "--gpus", "6", "--capacity", "3,3"],
    ["submit", "-y", "--detach", "--name", "new", "--cpu-workers", "3", "--capacity", "3", "--script", "job.py"],
    *(["jobs"], ["jobs", "--metrics"], ["jobs", "--on", "runs"]),
    *([verb, "old"] for verb in ("status", "why", "logs", "events", "stop", "retry", "suspend", "resume")),
    *([verb, "run"] for verb in ("status", "why", "logs", "events", "stop")),
    *(["logs", "run", "--follow"], ["events", "run", "--follow"], ["status", "run", "--watch"]),
    *(["delete", "old", "--no-wait"], ["export", "run"], ["export", "run", "--prometheus", "0"]),
    *(["report", "run", "--html", "report.html"], ["report", "old", "--html", "report.html"]),
    *(["ui", "nothing"], ["ui", "run", "--host", ELSEWHERE]),
    *(["server"], ["operator", "--no-desk"], ["doctor"], ["doctor", "--listening", "run"]),
]
PURE = [["plan", str(CLUSTER)], *(command for command in COMMANDS if command[0] in ("cost", "simulate"))]
"""Commands that compute much and know of no job."""
KNOWN = KnownRun(
    run_id="whole-1",
    name="whole",
    hosts=(HostSpec(node="a", destination="nobody@203.0.113.1", workers=1),),
    options=HostsOptions(),
    run_dir="",
)
WALK = """
import json, os, resource, sqlite3, sys
from ringweave.cli import main, torch_trial
from ringweave.platforms.local import registry, supervisor

condition, commands = sys.argv[1], json.loads(sys.argv[2])
supervisor.ensure_supervisor = lambda state, job_id, environ: None
registry.LOCK_TIMEOUT_S = 0.05
if condition.endswith(("registry", "registry at all", "output", "pipe", "folder")):
    # What the process that tries torch meets is as on any machine: it has no registry and writes no file, but a pipe.
    torch_trial.__file__ = os.path.abspath("trial.py")
jobs = os.path.join(os.environ["XDG_STATE_HOME"], "ringweave", "jobs.sqlite")
submitted = ["submit", "-y", "--detach", "--name", "old", "--cpu-workers", "3", "--capacity", "3", "--script", "job.py"]
assert main.run_command_line(submitted) == 0
if condition == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
elif condition == "few descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
elif condition == "no descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
elif condition == "read-only folder":
    for folder in (os.path.dirname(jobs), os.environ["XDG_STATE_HOME"], "."):
        os.chmod(folder, 0o555)
elif condition == "locked registry":
    holder = sqlite3.connect(jobs, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
elif condition == "damaged registry":
    with open(jobs, "r+b") as file:
        file.seek(100)
        file.write(bytes(range(256)) * 40)
    for suffix in ("-wal", "-shm"):
        if os.path.exists(jobs + suffix):
            os.unlink(jobs + suffix)
elif condition == "no registry at all":
    with open(jobs, "wb") as file:
        file.write(b"not a database, and longer than a header of SQLite is, which has a hundred bytes" * 40)
elif condition == "full output":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
elif condition == "closed output":
    os.close(1)
    sys.stdout = None
elif condition == "broken pipe":
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
else:
    raise AssertionError(condition)
for command in commands:
    try:
        found = main.run_command_line(command)
    except SystemExit as ended:
        found = ended.code
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    print(f"<{' '.join(command)}: {found}>", file=sys.stderr, flush=True)
if condition in ("full output", "broken pipe", "no descriptors"):
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
main._is_output_written()
"""


def commands_under(condition: str) -> list[list[str]]:
    """All commands, without work in which the condition makes no difference: it would only take time."""
    if "registry" in condition:
        return [command for command in COMMANDS if command not in PURE]
    is_about_output = condition.endswith(("output", "pipe"))
    return [command[:1] if is_about_output and "--figure" in command else command for command in COMMANDS]


TRIAL = """import json; print(json.dumps({"torch": ["ok", "2"], "gpus": ["missing", "none"]}))"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "condition",
    [
        *(
            "full disk",
            "full output",
            "broken pipe",
            "closed output",
            "read-only folder",
            "few descriptors",
            "no descriptors",
        ),
        *("locked registry", "damaged registry", "no registry at all"),
    ],
)
def test_no_verb_shows_a_traceback(tmp_path: Path, condition: str) -> None:
    assert {command[0] for command in COMMANDS} == set(VERBS)
    (tmp_path / "job.py").write_text("print('trained')\n")
    (tmp_path / "trial.py").write_text(TRIAL)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("KUBE", "RINGWEAVE"))}
    environ |= {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path), "PYTHONFAULTHANDLER": "1"}
    commands = commands_under(condition)
    argv = [sys.executable, "-c", WALK, condition, json.dumps(commands)]
    if condition == "read-only folder" and os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("root may write everywhere, and there is no setpriv")
        argv = [setpriv, "--bounding-set=-dac_override,-dac_read_search", *argv]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # a busy machine
    )
    text = done.stderr
    assert done.returncode == 0, text
    assert "Traceback" not in text, text
    assert "Exception ignored" not in text, text
    for command in commands:
        assert any(f"<{' '.join(command)}: {code}>" in text for code in (0, 1, 2, 75)), (command, text)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`ask("jobs")`, in an empty home folder with a finished run `good`: exit code, standard output and error."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no ssh
    monkeypatch.chdir(tmp_path)
    synthetic.write_run(tmp_path / "good", 2, 60, outcome="done", per_node=1)
    (tmp_path / "runs").mkdir()

    def call(*words: str) -> tuple[int, str, str]:
        code = main.run_command_line(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_file_of_a_run_on_hosts_that_cannot_be_read_hides_no_other_run(ask) -> None:
    started, folder = run_entry.known_runs_folder(), run_entry.hosts_state_folder() / "text-1"
    for path in (started, folder):
        path.mkdir(parents=True)
    (started / "empty.json").touch()  # by an earlier ringweave, on a full disk
    (folder / "host.json").write_text("{}")
    (folder / "entry.json").write_bytes(b"\xff\xfe")
    run_entry.save_known_run(KNOWN)
    assert [each.name for each in run_entry.list_known_runs()] == ["whole"]
    assert (started / "whole.json").stat().st_mode & 0o777 == 0o600
    assert ask("status", "good")[0] == 0
    code, out, err = ask("jobs", "--on", "hosts", "-o", "wide")
    assert (code, err) == (0, "")
    for name, file in (("empty", started / "empty.json"), ("text-1", folder / "entry.json")):
        assert f"its file cannot be read: {file}" in next(line for line in out.splitlines() if line.startswith(name))
        refused = ask("status", name, "--on", "hosts")
        assert refused[0] == 2
        assert f"run: '{name}', expected one whose file can be read. Use the ringweave that wrote it" in refused[2]
    assert "expected one whose file can be read" in ask("attach", "empty")[2]


@pytest.mark.parametrize(
    "change",
    [
        *({"cluster": value} for value in (None, 7, {}, {"nodes": None}, {"nodes": [{}]}, {"nodes": [{"name": 1}]})),
        *(
            {"cluster": {"nodes": [{"name": "n0", "workers": value}]}}
            for value in (None, -1, "x", [None], [[]], 10**30)
        ),
        *({"world_size": value} for value in (None, "2", -1, 1.5)),
        *({key: 7} for key in ("outcome", "mode", "cause")),
        *({"wall_s": value} for value in ("x", [1], 1e300, -1.0)),
        {"attempt": {}},
    ],
    ids=str,
)
def test_a_run_json_that_is_none_of_ours_is_refused_in_a_line(ask, tmp_path: Path, change: dict[str, Any]) -> None:
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    record = json.loads((tmp_path / "bad" / "run.json").read_text())
    (tmp_path / "bad" / "run.json").write_text(json.dumps(record | change))
    for words in (["status"], ["why"], ["logs"], ["events"], ["ui"], ["report", "--html", "x"], ["export"]):
        code, _, err = ask(*words, "bad")
        assert code == 2, words
        assert "expected the record of a run. Name the folder of a run of this ringweave" in err, words
    for name in ("good", "bad"):
        shutil.move(tmp_path / name, tmp_path / "runs" / name)
    code, out, err = ask("jobs", "--on", "runs", "-o", "wide")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["bad", "Failed"], ["good", "Succeeded"]]
    assert "expected the record of a run" in out
