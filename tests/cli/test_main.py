import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave import __version__
from ringweave.cli import doctor, main
from ringweave.cli.main import BENCH_VERBS, VERBS
from ringweave.errors import LaunchError, UsageError

GOLDEN = Path(__file__).parent / "golden"
ALL_VERBS = ", ".join([*VERBS, *BENCH_VERBS])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Make `doctor` raise this error."""

    def fail(error: Exception) -> None:
        def raise_it() -> None:
            raise error

        monkeypatch.setattr(doctor, "_run_checks", raise_it)

    return fail


@pytest.mark.parametrize("verb", ["", *VERBS, *BENCH_VERBS])
def test_help(verb: str, check_golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main.run_command_line([*([verb] if verb else []), "--help"]) == 0
    check_golden(GOLDEN / f"help{'-' * bool(verb)}{verb}.txt", capsys.readouterr().out)


def test_every_verb_of_the_table_is_there() -> None:
    context = main.ringweave_group.make_context("ringweave", ["--help"], resilient_parsing=True)
    for name in [*VERBS, *BENCH_VERBS]:
        command = main.ringweave_group.get_command(context, name)
        assert command is not None


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"ringweave {__version__}\n"


def test_help_loads_no_verb() -> None:
    code = (
        "import sys; from ringweave.cli import main; main.run_command_line(['--help']);"
        "loaded = {'ringweave.cli.run', 'ringweave.launch', 'numpy', 'torch', 'pydantic', 'psutil'} & set(sys.modules);"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


UNUSED_BY_STATUS = {
    *("asyncio", "cryptography", "numpy", "psutil", "ruamel", "ssl", "torch", "ringweave.cost", "ringweave.planning"),
    *(
        "ringweave.platforms.local.job_runtime",
        "ringweave.launcher.processes",
        "ringweave.rpc",
        "ringweave.schedules",
        "ringweave.topology.cluster_file",
    ),
}
UNUSED_BY_SUBMIT = UNUSED_BY_STATUS | {
    "ringweave.param_server",
    "ringweave.platforms.agent.agent_channel",
    "ringweave.telemetry",
}


UNUSED_BY_LAB = {"cryptography", "numpy", "ringweave.jobs", "ringweave.launcher", "ringweave.rpc", "torch"}
UNUSED_BY_RUN = {"numpy", "ringweave.cost", "ringweave.planning", "ringweave.schedules", "torch"}


def test_submit_status_lab_and_run_load_only_what_they_need(tmp_path: Path) -> None:
    """Of 200 commands at once, each needs the processor for what it imports."""
    (tmp_path / "job.py").write_text("")
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    submit = ["submit", "-y", "--detach", "--cpu-workers", "1", "--capacity", "1", "--min-per-node", "1"]
    submit += ["--script", "job.py", "--name", "tiny"]
    status, run = ["status", "tiny"], ["run", "--mode", "sync", "--elastic", "1:2", "--run-dir", "run", "--", "true"]
    lab = ["lab", "status"]
    needs = ((submit, UNUSED_BY_SUBMIT), (status, UNUSED_BY_STATUS), (lab, UNUSED_BY_LAB), (run, UNUSED_BY_RUN))
    for argv, unused in needs:
        stub = "from ringweave.platforms.local import supervisor; supervisor.ensure_supervisor = lambda *_: None;"
        code = (
            f"import sys; from ringweave.cli import main; {stub if argv is submit else ''}"
            f"code = main.run_command_line({argv}); loaded = {unused} & set(sys.modules);"
            "sys.exit(str(loaded) if loaded else code)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr


def test_no_verb_loads_torch() -> None:
    modules = ", ".join(f"ringweave.cli.{verb.module}" for verb in VERBS.values())
    modules += ", ringweave_bench.bench_command, ringweave_bench.chaos_command"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["rnu"], f"verb: 'rnu', expected one of {ALL_VERBS}. Did you mean run? See ringweave --help."),
        (["fly"], f"verb: 'fly', expected one of {ALL_VERBS}. See ringweave --help."),
        (["--zzz"], "No such option '--zzz'. See ringweave --help."),
        (["doctor", "--x"], "No such option '--x'. See ringweave doctor --help."),
        (["doctor", "--jsn"], "No such option '--jsn'. Did you mean '--json'? See ringweave doctor --help."),
        (["run"], "Missing argument 'SCRIPT'. See ringweave run --help."),
        (["run", "--workers"], "Option '--workers' requires an argument."),
    ],
)
def test_wrong_usage(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(argv) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"ringweave: error: {text}\n")


def test_no_verb_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Verbs:" in captured.err


@pytest.mark.parametrize(("error", "exit_code"), [(LaunchError("no room"), 1), (UsageError("no room"), 2)])
def test_our_errors_are_one_line_with_their_exit_code(failing, error, exit_code, capsys) -> None:
    failing(error)
    assert main.run_command_line(["doctor"]) == exit_code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "ringweave: error: no room\n")


def test_with_json_an_error_is_a_document_too(failing, capsys) -> None:
    failing(LaunchError("no room"))
    assert main.run_command_line(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"error": "no room"}
    assert main.run_command_line(["doctor", "--json", "--x"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": "No such option '--x'. See ringweave doctor --help."}


def test_json_of_another_program_is_not_ours(capsys) -> None:
    assert main.run_command_line(["run", "/nosuch.py", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_bug_keeps_its_traceback(failing) -> None:
    failing(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours"):
        main.run_command_line(["doctor"])


def test_an_interrupt_is_work_that_failed(monkeypatch, capsys) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_run_checks", interrupt)
    assert main.run_command_line(["doctor"]) == 1
    assert capsys.readouterr().err.strip() == "ringweave: error: interrupted"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["nosuch.py"], "script: 'nosuch.py', expected the path of a Python file. Check the path, or put -m before"),
        (["--", "nosuch.py"], "script: 'nosuch.py', expected the path of a Python file."),
        (["ls"], "script: 'ls', expected the path of a Python file. Check the path, or put -m before the name to run"),
        (
            ["--", "nosuch", "--x"],
            "command: 'nosuch', expected a program on the PATH, or the path of one. Check",
        ),
        (["-m", "nosuch"], "module: 'nosuch', expected a module that `python -m` finds from this directory. Check"),
        (
            ["--workers", "0", "x.py"],
            "--workers: '0', expected one positive whole number per node, separated by commas.",
        ),
        (["--workers", "two", "x.py"], "--workers: 'two', expected one positive whole number per node"),
        (["--workers", "", "x.py"], "--workers: '', expected one positive whole number per node"),
        (["--workers", "2", "--cluster", "c", "x.py"], "--workers and --cluster: both given, expected one of them."),
        (["--workers", "", "--cluster", "c", "x.py"], "--workers and --cluster: both given, expected one of them."),
        (["--cluster", "nosuch.yaml", "x.py"], "nosuch.yaml"),
        (["--schedule", "rnig", "x.py"], "schedule: 'rnig', expected one of "),
        (
            ["--mode", "balance", "x.py"],
            "mode: 'balance', expected one of auto, sync, balanced, ps-hra, ps, local. Did you mean",
        ),
        (["--run-dir", "x.py", "x.py"], "expected a directory that can be written"),
    ],
)
def test_wrong_input_of_run(argv, text, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    assert main.run_command_line(["run", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ringweave: error: ")
    assert text in captured.err
    assert not (tmp_path / "runs").exists()
