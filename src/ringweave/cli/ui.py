"""`ringweave ui` and `ringweave report`: the page of a run, live or as one file."""

import time
from pathlib import Path
from typing import TextIO

import click

from ringweave.cli import job_options
from ringweave.cli.echo import echo
from ringweave.cli.job_options import JOB_ARGUMENT, ON_OPTION
from ringweave.errors import LaunchError
from ringweave.files import file_io
from ringweave.page import html_report, run_model
from ringweave.page.run_source import RunSource


@click.command
@ON_OPTION
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="PORT", help="Default: a free one.")
@JOB_ARGUMENT
def command(place: str | None, host: str, port: int, name: str) -> int:
    """Show what goes on in JOB, or in the run of a run directory, on a page for a browser, until interrupted.

    The address that is printed has a token, without which nobody sees anything. On another machine, forward the port
    (ssh -L PORT:localhost:PORT HOST) and leave --host: the page is served without encryption.
    """
    source = _open_source(place, name)
    try:
        from ringweave.page import page_server
    except ModuleNotFoundError as error:
        do = "Install it with pip install 'ringweave[ui]', or write the page to a file with ringweave report"
        raise LaunchError("ui", got=f"no {error.name}", expected="aiohttp", do=do) from error
    page_server.serve(source, host, port, lambda url: echo(f"ringweave: {name} at {url}"))
    return 0


@click.command
@ON_OPTION
@click.option("--html", "path", required=True, metavar="FILE", help="File to write.")
@click.option("--preface", type=click.File(encoding="utf-8"), help="HTML to put before it; it may have no scripts.")
@JOB_ARGUMENT
def report(place: str | None, path: str, preface: TextIO | None, name: str) -> int:
    """Write the page of JOB, or of the run of a run directory, to one HTML file, which needs no network."""
    file_io.check_writable("--html", path)
    source = _open_source(place, name)
    source.read_all()
    sections = run_model.dump_sections(source.sections() | {"written_s": time.time()})
    html = html_report.report_html(sections, preface.read() if preface else "")
    file_io.write_output("--html", path, html)
    echo(f"ringweave: {name}: {path}, {Path(path).stat().st_size / 1e6:.2f} MB")
    return 0


def _open_source(place: str | None, name: str) -> RunSource:
    platform = job_options.open_user_platform(place or job_options.find_place(name))
    return RunSource(platform, name)
