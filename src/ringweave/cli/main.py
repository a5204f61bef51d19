"""Entry point of `ringweave`: finds the verb, calls it, and turns errors into one line and an exit code."""

import difflib
import importlib
import itertools
import json
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from ringweave import __version__
from ringweave.cli.verbs import VERBS
from ringweave.errors import RingweaveError


class LazyGroup(click.Group):
    """A group whose verbs are imported when called, so that `--help` is fast and a verb loads only what it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        if cmd_name not in VERBS:
            return None
        verb = VERBS[cmd_name]
        return getattr(importlib.import_module(f"ringweave.cli.{verb.module}"), verb.command)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs from the table, importing none; options as usual."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=verb.help) for name, verb in VERBS.items() if name.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown verb with a suggestion."""
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            close = difflib.get_close_matches(name, VERBS, n=1)
            do = f"Did you mean {close[0]}?" if close else "See ringweave --help."
            raise click.UsageError(f"verb: {name!r}, expected one of {', '.join(VERBS)}. {do}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs from the table, importing none."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ringweave", message="%(prog)s %(version)s")
def group() -> None:
    """Distributed training on unequal machines and unequal networks, on PyTorch."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the work failed, 2 wrong usage or input."""
    sys.exit(call(list(sys.argv[1:] if argv is None else argv)))


def call(argv: list[str]) -> int:
    """Run the command line; the exit code. Errors that are not ours to explain keep their traceback."""
    try:
        return group.main(argv, prog_name="ringweave", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _refuse(_usage_text(error), 2, argv)
    except click.Abort:
        return _refuse("interrupted", 1, argv)
    except RingweaveError as error:
        return _refuse(str(error), error.exit_code, argv)


def _usage_text(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    text = error.format_message()
    return f"{text} See {context.command_path} --help." if context and "--help" not in text else text


def _refuse(text: str, exit_code: int, argv: list[str]) -> int:
    click.echo(f"ringweave: error: {text}", err=True)
    if _wants_json(argv):
        click.echo(json.dumps({"error": text}))
    return exit_code


_JSON = {"--json", "-ojson", "-o json", "--output=json", "--output json"}


def _wants_json(argv: list[str]) -> bool:
    """Whether a verb that takes --json was given it; what follows `run` may be another program's."""
    verb = VERBS.get(argv[0]) if argv else None
    pairs = [" ".join(pair) for pair in itertools.pairwise(argv)]
    asks = not _JSON.isdisjoint([*argv, *pairs])
    if verb is None or not asks:
        return False
    return verb.answers or any(word in verb.answering for word in argv[1:2])
