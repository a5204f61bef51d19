"""Pages of docs/reference that are generated from the code: `python tools/reference_pages.py` writes them.

cli.md comes from the click commands, job-states.md from `ringweave.jobs.states`, events.md from
`ringweave.telemetry.kinds`. `tests/test_reference_pages.py` fails when a page differs from the code.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from ringweave.cli.main import BENCH_VERBS, VERBS, ringweave_group
from ringweave.jobs import states
from ringweave.jobs.states import JobState
from ringweave.telemetry import kinds

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_CLI_HEAD = """# Command line

This page is generated from the commands; `python tools/reference_pages.py` writes it.

Every command exits with 0 if its work is done, 1 if the work failed, and 2 if its usage or input was wrong. An error is
one line on standard error; with `--json` it is also a JSON document `{"error": TEXT}` on standard output. `ringweave
VERB --help` prints what is here.

Completion of verbs, options and names of jobs, here for bash (`zsh_source` and `fish_source` for the others):

```sh
eval "$(_RINGWEAVE_COMPLETE=bash_source ringweave)"
```

"""

_BENCH_HEAD = """The verbs from here on come with the extra `bench`: `pip install 'ringweave[bench]'`, or in a clone
`pip install ./bench`.

"""

_JOB_STATES_HEAD = """# States of jobs and nodes

This page is generated from `src/ringweave/jobs/states.py`; `python tools/reference_pages.py` writes it. `ringweave
status` and `ringweave why` print these states and reasons. [Job lifecycle](../explanation/job-lifecycle.md) explains
attempts, rounds and retries.

"""

JOB_STATE_TEXTS: Mapping[JobState, str] = {
    JobState.SUSPENDED: "Admitted; no process of the job runs until it is resumed.",
    JobState.PENDING: "The worker groups are created, and wait at the start barrier.",
    JobState.STARTING: "All groups were ready and the barrier is released; some have not started yet.",
    JobState.RUNNING: "All groups train or have finished; of an elastic job, enough of them.",
    JobState.RETRYING: "A node failed and is replaced; the other nodes wait at the start barrier again.",
    JobState.ENDING: "The outcome is decided; some groups have not ended yet.",
    JobState.SUCCEEDED: "All groups finished with exit code 0.",
    JobState.FAILED: "The script failed, or a node failed more often than max_retries allows.",
    JobState.STOPPED: "A user stopped the job.",
    JobState.DELETING: "All objects and files of the job are being removed.",
}

_S = JobState
_AFTER_RUNNING = (_S.ENDING, _S.SUCCEEDED, _S.FAILED, _S.STOPPED, _S.DELETING, _S.SUSPENDED)

TRANSITIONS: Mapping[JobState, tuple[JobState, ...]] = {
    _S.SUSPENDED: (_S.PENDING, _S.ENDING, _S.STOPPED, _S.DELETING),
    _S.PENDING: (_S.STARTING, _S.RUNNING, _S.RETRYING, *_AFTER_RUNNING),
    _S.STARTING: (_S.RUNNING, _S.RETRYING, *_AFTER_RUNNING),
    _S.RUNNING: (_S.RETRYING, *_AFTER_RUNNING),
    _S.RETRYING: (_S.STARTING, _S.RUNNING, *_AFTER_RUNNING),
    _S.ENDING: (_S.SUCCEEDED, _S.FAILED, _S.STOPPED, _S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.SUCCEEDED: (_S.DELETING,),
    _S.FAILED: (_S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.STOPPED: (_S.PENDING, _S.SUSPENDED, _S.DELETING),
    _S.DELETING: (),
}
"""State -> states that can follow it."""
REASON_STATES: Mapping[str, str] = {
    "Suspended": "Suspended",
    "Suspending": "Suspended",
    "Unschedulable": "Pending, Retrying",
    "CannotStart": "Pending, Retrying",
    "MachineUnreachable": "Pending, Retrying, Ending, Suspended, Deleting",
    "Initializing": "Pending",
    "NotReady": "Pending",
    "Restarting": "Retrying",
    "Degraded": "Running",
    "DegradedWithoutRetries": "Running",
    "DeterminingCause": "Pending, Starting, Retrying",
    "BarrierReleased": "Starting",
    "Completed": "Ending, Succeeded",
    "CompletedWithoutNodes": "Ending, Succeeded",
    "NonZeroExitCode": "Ending, Failed",
    "BackoffLimitExceeded": "Ending, Failed",
    "Preempted": "Ending, Failed",
    "Stopped": "Ending, Stopped",
    "Deleting": "Deleting",
    "NodeUnused": "Unused",
    "NodeSuspended": "Waiting",
    "NodeTerminating": "Waiting",
    "NodeBackOff": "Waiting",
    "NodeNotCreated": "Waiting",
    "NodeUnschedulable": "Pending",
    "NodeInitializing": "Pending",
    "NodeUnreachable": "Waiting, Pending, Ready, Running, Interrupted",
    "NodeCannotStart": "Pending",
    "NodeAtBarrier": "Ready",
    "NodeReleased": "Ready",
    "NodeRestarting": "Interrupted",
    "NodeFailing": "Failed, Interrupted",
    "NodeCompleted": "Succeeded",
    "NodeAbandoned": "Stopped",
    "NodeFailed": "Failed",
    "NodeBackoffLimitExceeded": "Failed",
    "NodeStopped": "Stopped",
}
"""Code of a reason -> states that have it."""


def reference_pages() -> Mapping[str, str]:
    """Return the text of every generated page by its file name."""
    return {"cli.md": cli_page(), "job-states.md": job_states_page(), "events.md": kinds.to_markdown()}


def cli_page() -> str:
    """Return the page of all verbs, in the order of `ringweave --help`."""
    parent = click.Context(ringweave_group, info_name="ringweave", **ringweave_group.context_settings)
    verbs = [*VERBS, *BENCH_VERBS]
    contents = "".join(f"- [`{name}`](#ringweave-{name})\n" for name in verbs)
    core, bench = (
        "".join(text for name in names for text in _command_sections(name, parent)) for names in (VERBS, BENCH_VERBS)
    )
    return f"{_CLI_HEAD}{contents}\n{core}{_BENCH_HEAD}{bench}".rstrip() + "\n"


def job_states_page() -> str:
    """Return the page of states, reasons and the state diagram."""
    return (
        f"{_JOB_STATES_HEAD}{_states_to_markdown()}\n"
        f"The diagram leaves out that every state can go to Deleting.\n\n```mermaid\n{_states_to_mermaid()}```\n"
    )


def _states_to_mermaid() -> str:
    """Return the state diagram of docs/reference/job-states.md; DELETING is drawn after end states only."""
    lines = ["stateDiagram-v2", "    [*] --> Pending", "    [*] --> Suspended"]
    for state, after in TRANSITIONS.items():
        lines += [f"    {state} --> {other}" for other in after if other is not JobState.DELETING or state.is_end]
    return "\n".join([*lines, "    Deleting --> [*]"]) + "\n"


def _states_to_markdown() -> str:
    """Return the tables of states and reasons of docs/reference/job-states.md."""
    rows = [f"| {state} | {meaning} |" for state, meaning in JOB_STATE_TEXTS.items()]
    reasons = []
    for code, kind in states.REASON_TEMPLATES.items():
        subject = "node" if code.startswith("Node") else "job"
        texts = f"{_without_braces(kind.text)} | {_without_braces(kind.hint)}"
        reasons.append(f"| {subject} | {REASON_STATES[code]} | `{code}` | {texts} |")
    return "\n".join(
        [
            "| state | meaning |",
            "|---|---|",
            *rows,
            "",
            "| of | state | reason | text | hint |",
            "|---|---|---|---|---|",
            *reasons,
            "",
        ]
    )


def _without_braces(text: str) -> str:
    return text.replace("{", "_").replace("}", "_").replace("|", "\\|")


def _command_sections(name: str, parent: click.Context) -> Iterator[str]:
    """Yield the section of a command, then those of its subcommands."""
    group = parent.command
    command = group.get_command(parent, name) if isinstance(group, click.Group) else None
    if command is None:
        raise LookupError(f"command: {parent.command_path} {name!r}, expected one that is installed. Install ./bench.")
    context = click.Context(command, info_name=name, parent=parent)
    yield _section(command, context)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            yield from _command_sections(each, context)


def _section(command: click.Command, context: click.Context) -> str:
    level = "#" * (1 + context.command_path.count(" "))
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = f"{level} {context.command_path}\n\n```text\n{usage}\n```\n\n{_paragraphs(command.help or '')}"
    rows = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    rows = [row for row in rows if row[1] and "--help" not in row[0]]
    if not rows:
        return f"{text}\n"
    lines = [f"| {_code(option)} | {_cell(meaning)} |" for option, meaning in rows]
    return "\n".join([text, "| option | meaning |", "|---|---|", *lines, "", ""])


def _paragraphs(text: str) -> str:
    """Return the help text as paragraphs of Markdown."""
    parts = text.replace("\b", "").strip().split("\n\n")
    return "\n\n".join(textwrap.fill(_cell(part), 120, break_long_words=False) for part in parts) + "\n"


def _cell(text: str) -> str:
    """Return text in which no character means something to Markdown."""
    return re.sub(r"([|<>*_\[\]])", r"\\\1", " ".join(text.split())) if "`" not in text else text.replace("|", "\\|")


def _code(option: str) -> str:
    """Return an option as code inside of a table cell."""
    return "`" + " ".join(option.split()).replace("|", "\\|") + "`"


def main() -> None:
    """Write all pages."""
    for name, text in reference_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
