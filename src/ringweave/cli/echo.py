"""Text of the command line for people: names, reasons and events of others cannot act on the terminal."""

import click

from ringweave.errors import printable


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text, of several lines at most: what is not printable in it is shown in Python's escapes.

    Args:
        text: Any text; JSON stays as it is.
        err: Print to standard error.
        nl: Add a line end.
    """
    click.echo(printable(text, keeps="\n\t"), err=err, nl=nl)
