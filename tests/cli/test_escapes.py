"""Names, reasons, events and logs of others cannot act on a terminal: escapes, bidi marks, line ends are shown."""

import ast
import io
import json
from pathlib import Path

import pytest

from ringweave.cli import main
from ringweave.launcher.output import write_message
from ringweave.telemetry import print_line
from tests.page import synthetic

CLI = Path(main.__file__).parent
ACTING = ("\x1b", "\u202e", "\u2066", "\x00", "\r", "\x9b", "\u2028")
HOSTILE = "a\x1b[2Jb\u202ec\u2066d\x9be\u2028f"


def is_harmless(text: str) -> bool:
    return not any(each in text for each in ACTING)


def test_all_of_the_command_line_prints_by_way_of_echo() -> None:
    """JSON is ASCII; documents in YAML are for programs."""
    for path in sorted(CLI.glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        printed = [
            ast.unparse(each) for each in calls if ast.unparse(each.func) in ("click.echo", "print", "click.secho")
        ]
        allowed = {
            "job_options.py": ["yaml_files.dump_yaml"],
            "echo.py": ["printable", "self._stream"],
            "torch_trial.py": ["json.dumps"] * 2,
        }
        for text, part in zip(printed, allowed.get(path.name, ["use echo"] * len(printed)), strict=True):
            assert part in text, f"{path.name}: {text}: use echo"


@pytest.mark.parametrize("words", [["status"], ["why"], ["events"], ["logs"], ["status", "-o", "json"]])
def test_verbs_show_hostile_texts_of_a_run_escaped(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = synthetic.write_run(tmp_path / "run", 16, 20, outcome="failed")
    with (folder / "events.jsonl").open("a") as file:
        for kind in ("worker_failed", "node_failed", HOSTILE):
            file.write(
                json.dumps({"time": synthetic.BEGIN_S + 1, "kind": kind, "reason": HOSTILE, "node": HOSTILE}) + "\n"
            )
    (folder / "logs" / "rank-0.log").write_text(f"{HOSTILE}\n{synthetic.HOSTILE}\n")
    exit_code = main.run_command_line([words[0], str(folder), *words[1:]])
    shown = "".join(capsys.readouterr())
    assert exit_code in (0, 1), shown
    assert is_harmless(shown), repr(shown)
    assert r"\x1b" in shown or r"\u001b" in shown


@pytest.mark.parametrize(
    "words", [["status", HOSTILE], [HOSTILE], ["plan", HOSTILE], ["--" + HOSTILE], ["why", f"x\n{HOSTILE}"]]
)
def test_errors_show_hostile_arguments_escaped(words: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run_command_line(words) != 0
    shown = "".join(capsys.readouterr())
    assert is_harmless(shown), repr(shown)
    assert r"\x1b" in shown


def test_messages_of_a_run_are_escaped_and_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    write_message(output, f"ringweave: failed: {HOSTILE}\n\tlast lines\n")
    output.seek(0)
    assert output.read() == "ringweave: failed: a\\x1b[2Jb\\u202ec\\u2066d\\x9be\\u2028f\n\tlast lines\n"
    print_line(f"rank {HOSTILE}")
    print_line(HOSTILE, is_error=True)
    assert is_harmless("".join(capsys.readouterr()))
