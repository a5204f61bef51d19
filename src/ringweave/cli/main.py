"""Entry point of `ringweave`: looks the verb up in a table, calls it, turns errors into one line and an exit code."""

import contextlib
import difflib
import importlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ringweave import __version__
from ringweave.cli.echo import echo
from ringweave.errors import from_system

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """One verb of the command line."""

    module: str
    """Module in `ringweave.cli`."""
    command: str = "command"
    help: str
    """One line for the list of verbs."""


VERBS: Mapping[str, Verb] = {
    "run": Verb(module="run", help="Run a PyTorch program on several workers."),
    "attach": Verb(module="run", command="attach_command", help="Follow a run on hosts again."),
    "join": Verb(module="run", command="join_command", help="Take part in a run from a host that ssh does not reach."),
    "scale": Verb(module="run", command="scale_command", help="Give an elastic run more or fewer workers."),
    "lab": Verb(module="lab", help="Bring a cluster file up on this machine: namespaces, limited links."),
    "discover": Verb(module="discover", help="Describe this machine and its leader device, and write a cluster file."),
    "plan": Verb(
        module="plan", help="Print a cluster's bound and the schedule that is chosen for it; or a pipeline's stages."
    ),
    "cost": Verb(module="cost", help="Predict a training round by the formulas of four architectures."),
    "simulate": Verb(
        module="simulate", help="Simulate a collective or a pipeline on a cluster, with stragglers and failures."
    ),
    "partition": Verb(module="partition", help="Cut a model into pipeline stages for unequal devices and links."),
    "split": Verb(module="submit", command="split_gpus", help="Split GPUs over unequal nodes, at least three on each."),
    "submit": Verb(module="submit", help="Submit a job: a number of GPUs over unequal nodes."),
    "jobs": Verb(module="jobs", command="jobs", help="List the jobs of a platform."),
    "status": Verb(module="jobs", command="status", help="Show the state of a job and its nodes."),
    "why": Verb(module="jobs", command="why", help="Show why a job does not run, or what it loses time to."),
    "export": Verb(module="export", help="Export a run to Prometheus and other programs."),
    "ui": Verb(module="ui", help="Show a job or a run on a live page in the browser."),
    "report": Verb(module="ui", command="report", help="Write the page of a job or a run to one HTML file."),
    "logs": Verb(module="jobs", command="logs", help="Print the output of a job's workers."),
    "events": Verb(module="jobs", command="events", help="List the events of a job."),
    "stop": Verb(module="jobs", command="stop", help="End a job."),
    "delete": Verb(module="jobs", command="delete", help="Remove a job with its files."),
    "retry": Verb(module="jobs", command="retry", help="Start a failed or stopped job again."),
    "suspend": Verb(module="jobs", command="suspend", help="Keep a job from running."),
    "resume": Verb(module="jobs", command="resume", help="Let a suspended job run."),
    "server": Verb(module="server", help="Run the parameter server of a job in mode ps-hra."),
    "operator": Verb(module="operator", help="Run the operator of TrainingJobs in a Kubernetes cluster."),
    "doctor": Verb(module="doctor", help="Check this machine's installation, and print fixes."),
}


COMMANDS_GROUP = "ringweave.commands"
"""Entry points of other distributions that add a verb: its name, and `module:command`."""
BENCH_VERBS: Mapping[str, str] = {
    "bench": "Measure ringweave beside Gloo, Open MPI and MPICH.",
    "chaos": "Inject faults into a job in a lab, and measure their cost.",
}
"""Verbs of the distribution ringweave-bench, which the extra `bench` brings; one line for the list of verbs each."""


def _added_verbs() -> dict[str, "EntryPoint"]:
    """Return the verbs that other installed distributions add, by name."""
    from importlib.metadata import entry_points  # most verbs do not need them

    return {each.name: each for each in entry_points(group=COMMANDS_GROUP) if each.name not in VERBS}


class LazyGroup(click.Group):
    """Group that imports a verb when it is called: `--help` is fast, and a verb loads only what it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all verbs: those of the table in its order, then those of other distributions."""
        return [*VERBS, *sorted(_added_verbs())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        return self.find_command(cmd_name)

    def find_command(self, name: str) -> click.Command | None:
        """Import one verb; None if there is none of that name."""
        if name not in VERBS:
            added = _added_verbs().get(name)
            return added.load() if added is not None else None
        verb = VERBS[name]
        return getattr(importlib.import_module(f"ringweave.cli.{verb.module}"), verb.command)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete verbs from the table without imports, and options as usual."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [
            CompletionItem(name, help=VERBS[name].help if name in VERBS else BENCH_VERBS.get(name)) for name in names
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown verb with a suggestion."""
        name = args[0]
        if name not in VERBS and not name.startswith("-") and name not in _added_verbs():
            verbs = self.list_commands(ctx)
            close = difflib.get_close_matches(name, verbs, n=1)
            do = f"Did you mean {close[0]}?" if close else "See ringweave --help."
            if name in BENCH_VERBS:
                do = "Install the bench: pip install 'ringweave[bench]', or pip install ./bench in a clone."
            raise click.UsageError(f"verb: {name!r}, expected one of {', '.join(verbs)}. {do}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs of the table and of ringweave-bench without imports, and any others by their own help."""
        rows = [(name, verb.help) for name, verb in VERBS.items()]
        rows += [
            (name, BENCH_VERBS.get(name) or each.load().get_short_help_str(limit=100))
            for name, each in sorted(_added_verbs().items())
        ]
        with formatter.section("Verbs"):
            formatter.write_dl(rows)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ringweave", message="%(prog)s %(version)s")
def ringweave_group() -> None:
    """Distributed training on unequal machines and unequal networks, on PyTorch."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the work failed, 2 wrong usage or input."""
    threading.excepthook = _report_thread
    exit_code = run_command_line(list(sys.argv[1:] if argv is None else argv))
    sys.exit(exit_code if _is_output_written() else exit_code or 1)


def run_command_line(argv: list[str]) -> int:
    """Run the command line; return the exit code. Unexpected errors, which are bugs of ours, keep their traceback."""
    _open_closed_streams()
    try:
        return ringweave_group.main(argv, prog_name="ringweave", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _print_error(_usage_text(error), 2, argv)
    except click.Abort:
        return _print_error("interrupted", 1, argv)
    except Exception as error:
        known = from_system(error)
        if known is None:
            raise
        return _print_error(str(known), known.exit_code, argv)


def _open_closed_streams() -> None:
    """Give a process that was started without standard streams empty ones: else a socket may get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _is_output_written() -> bool:
    """Return whether all output has arrived; else drop the rest, which Python would write again at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Report an error that ends a thread: in one line as those of the command, or with its traceback as a bug."""
    known = from_system(failed.exc_value) if failed.exc_value is not None else None
    if known is None:
        threading.__excepthook__(failed)
    elif not isinstance(failed.exc_value, BrokenPipeError):
        _print_error(str(known), 1, [])


def _usage_text(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    text = error.format_message()
    return f"{text} See {context.command_path} --help." if context and "--help" not in text else text


def _print_error(text: str, exit_code: int, argv: list[str]) -> int:
    with contextlib.suppress(OSError):  # there is nowhere left to report to
        echo("ringweave: error: " + text, err=True)
        if _wants_json(argv):
            echo(json.dumps({"error": text}))
    return exit_code


_JSON_FLAGS = {"--json", "-ojson", "-o json", "--output=json", "--output json"}


def _wants_json(argv: list[str]) -> bool:
    """Return whether a verb that takes --json was given it; words after `run` may belong to another program."""
    pairs = [" ".join(pair) for pair in itertools.pairwise(argv)]
    if not argv or _JSON_FLAGS.isdisjoint([*argv, *pairs]):
        return False
    command = LazyGroup().find_command(argv[0])
    if isinstance(command, click.Group):
        command = command.commands.get(next(iter(argv[1:]), ""))
    return command is not None and any("--json" in each.opts for each in command.params)
