"""A real Slurm cluster for the session: a node with 10 GPUs that are pretended, and one with 5."""

import os
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ringweave.jobs import request
from ringweave.platforms.api import JobView, LogQuery
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.lease import SlurmTimeouts
from ringweave.platforms.slurm.platform import SlurmPlatform
from tests.fakes import slurm
from tests.fakes.slurm import FakeGpuSlurmCluster
from tests.polling import wait_until

DEADLINE_S = 400
"""What takes longer hangs; a busy machine needs many times what an idle one does."""
PATIENCE = SlurmTimeouts(lease_s=60.0, fence_s=75.0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[FakeGpuSlurmCluster]:
    problems = slurm.slurm_problems()
    if problems:
        pytest.skip(" ".join(problems))
    with FakeGpuSlurmCluster({"big": 10, "small": 5}, name=f"slurm-{os.getpid()}") as up:
        yield up


class Jobs:
    """A service with a folder of its own, seen from where people log in."""

    def __init__(self, cluster: FakeGpuSlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.environ = {**environ, "OMP_NUM_THREADS": "1"}
        self.service = self.open()

    def open(self) -> SlurmPlatform:
        slurm = SlurmClient(self.run)
        return SlurmPlatform(self.folder / "state", slurm, requester="ann", environ=self.environ, timeouts=PATIENCE)

    def run(self, argv, stdin, environ) -> CompletedProcess[str]:
        return subprocess.run(
            self.cluster.wrap_command(argv), input=stdin, capture_output=True, text=True, check=False, env=environ
        )

    def submit(self, script: str, extra: str = "", *, gpus: int = 15, nodes: str = "[{capacity: 10}, {capacity: 5}]"):
        (self.folder / "train.py").write_text("import os, time\nfrom pathlib import Path\n" + textwrap.dedent(script))
        text = f"name: text\ngpus: {gpus}\nscript: train.py\nnodes: {nodes}\n{extra}"
        return self.service.submit(request.parse_request(text), base=self.folder)

    def view(self) -> JobView:
        return self.service.job("text")

    def wait(self, *states: str) -> JobView:
        def there() -> bool:
            view = self.view()
            assert not view.state.is_end or view.state in states, self.story()
            return view.state in states

        wait_until(there, self.story)
        return self.view()

    def lines(self, **which: object) -> list[str]:
        return [line.text for line in self.service.logs("text", LogQuery(**which))]

    def wait_printed(self, text: str, times: int) -> None:
        wait_until(lambda: self.lines().count(text) >= times, lambda: (text, self.lines(), self.story()))

    def attempts(self) -> list[int]:
        return [len(node.attempts) for node in self.view().used_nodes]

    def story(self) -> str:
        """All that helps to see why a test fails."""
        files = [*self.folder.glob("state/jobs/*/controller.log"), *self.folder.glob("state/jobs/*/runs/*/*/agent.log")]
        logs = [f"{path}: {path.read_text(errors='replace')}" for path in files]
        return "\n".join([str(self.view()), self.cluster.run_command("scontrol", "show", "job"), *logs])

    def wait_idle(self) -> None:
        """Slurm has nothing left of any job."""
        wait_until(lambda: not self.cluster.run_command("squeue", "-h"), lambda: self.cluster.run_command("squeue"))


@pytest.fixture
def jobs(cluster: FakeGpuSlurmCluster, tmp_path: Path) -> Iterator[Jobs]:
    cluster.wait_ready(["big", "small"])
    yield Jobs(cluster, tmp_path)
    cluster.run_command("scancel", "--user=root")
    wait_until(lambda: not cluster.run_command("squeue", "-h"), lambda: cluster.run_command("squeue"))
