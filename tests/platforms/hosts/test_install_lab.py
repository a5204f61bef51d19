"""Installation on nodes with a real sshd, from an environment that holds the wheel alone."""

import io
import sys
import zipfile

import pytest

from ringweave import __version__
from ringweave.platforms.hosts import install, install_main
from ringweave_bench import ssh_lab
from tests import demands

TIMEOUT_S = 390.0
_SCRIPT = """
import os, ringweave, torch, torch.distributed as dist
dist.init_process_group("ringweave")
total = torch.ones(1)
dist.all_reduce(total)
print("FOUND", os.uname().nodename, int(total), ringweave.__file__)
dist.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_installs_ringweave_on_nodes_that_have_none(request: pytest.FixtureRequest) -> None:
    demands.need(request.config, demands.LAB, ssh_lab.problems())
    with ssh_lab.ssh_lab(2) as lab:
        first, second = lab.nodes
        first.write("job/train.py", _SCRIPT)
        for node in lab.nodes:
            node.write(".config/pip/pip.conf", "[global]\nno-index = true\n")
        python = first.make_venv("start")
        site = f"start/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        with zipfile.ZipFile(io.BytesIO(install.installed_wheel().content)) as archive:
            for name in archive.namelist():
                first.write(f"{site}/{name}", archive.read(name).decode())
        first.write(f"{site}/lab.pth", "".join(f"{each}\n" for each in sys.path if each.endswith("-packages")))
        command = [python, "-m", "ringweave", "run", "--hosts", "n0:1,n1:1", "--python", sys.executable, "--install"]
        done = first.run([*command, "job/train.py"], check=False, timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        venv = f"{second.home}/{install_main.ROOT}/venv-{__version__}"
        found = sorted(line.partition("FOUND ")[2].split() for line in done.stdout.splitlines() if "FOUND " in line)
        assert [words[:2] for words in found] == [["n0", "2"], ["n1", "2"]]
        assert all(words[2].startswith(f"{venv}/lib/") for words in found)
        assert f"host n1: making {venv} with {sys.executable}" in done.stderr

        doctor = [python, "-m", "ringweave", "doctor", "--hosts", "n0,n1", "--python", sys.executable, "--install"]
        again = first.run(doctor, check=False, timeout_s=TIMEOUT_S)
        assert (again.returncode, again.stderr) == (0, ""), again.stdout + again.stderr
        assert again.stdout.endswith("A run on these hosts works.\n")
        second.fill_disk()
        (second.path(f"{venv}/{install_main.MARKER}")).unlink()
        full = first.run(doctor, check=False, timeout_s=TIMEOUT_S)
        assert full.returncode == 1
        assert f"disk of {venv} on host n1: 'full', expected room for the packages. Free space there" in full.stderr
