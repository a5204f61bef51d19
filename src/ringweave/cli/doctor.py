"""`ringweave doctor`: what is here and works, and how to mend what does not."""

import json
import os

import click

from ringweave.cli.checks import diagnosis, machine, software
from ringweave.cli.checks.diagnosis import Observation


@click.command
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> int:
    """Try what ringweave needs on this machine, and say how to mend what does not work.

    Everything is tried for real and removed again. Exit code 0 if all works that training on workers of this machine
    needs, else 1.
    """
    findings = diagnosis.diagnose(_observe())
    click.echo(json.dumps(diagnosis.to_json(findings)) if as_json else diagnosis.to_table(findings), nl=as_json)
    return 0 if diagnosis.is_fit(findings) else 1


def _observe() -> dict[str, Observation]:
    return {
        "python": software.python(),
        "ringweave": software.ringweave(),
        "autoload": software.autoload(os.environ),
        **machine.torch(),
        "examples": software.extras(),
        "lab": machine.lab(),
        "cpu-quota": machine.cpu_quota(),
        "mpi": software.program(["mpirun", "--version"]),
        "slurm": software.program(["sbatch", "--version"]),
        "kubectl": software.program(["kubectl", "version", "--client"]),
        "hwloc": software.program(["lstopo", "--version"]),
    }
