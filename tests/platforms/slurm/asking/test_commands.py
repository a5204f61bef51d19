"""What Slurm's commands print, read; and what is said when they fail."""

from subprocess import CompletedProcess

import pytest

from ringweave.errors import LaunchError
from ringweave.platforms.slurm.commands import SlurmClient, SlurmHost, SlurmStep
from tests.platforms.slurm.fakes import FakeSlurm


def answering(out: str = "", err: str = "", code: int = 0) -> SlurmClient:
    return SlurmClient(lambda argv, stdin, environ: CompletedProcess([], returncode=code, stdout=out, stderr=err))


def test_a_heterogeneous_job_is_one_allocation():
    fake = FakeSlurm(states={10: "RUNNING"}, restarts={10: 2})
    found = SlurmClient(fake.run).get_allocation(10)
    assert found is not None
    assert (found.state, found.restarts, found.hosts) == ("RUNNING", 2, ("big", "small"))
    assert not found.is_pending
    assert not found.is_over


def test_a_waiting_one_has_no_hosts_and_a_forgotten_one_is_none():
    fake = FakeSlurm(states={10: "PENDING"}, reasons={10: "Resources"})
    found = SlurmClient(fake.run).get_allocation(10)
    assert found is not None
    assert found.is_pending
    assert (found.hosts, found.reason, found.start) == ((), "Resources", "")
    assert SlurmClient(fake.run).get_allocation(11) is None


def test_hosts_with_typed_and_several_kinds_of_gpus():
    lines = "a|64|gpu:h100:8(S:0-1)|mix|main*\nb|8+|(null)|down*|main*\nc|8|gpu:a:2,gpu:b:1,nic:4|idle|other\n"
    assert answering(lines).list_hosts() == [
        SlurmHost(name="a", gpus=8, cpus=64, state="mix"),
        SlurmHost(name="b", gpus=0, cpus=8, state="down*"),
    ]
    assert [host.is_responding for host in answering(lines).list_hosts()] == [True, False]
    chosen = answering(lines.splitlines(keepends=True)[2]).list_hosts({"SBATCH_PARTITION": "other"})
    assert chosen == [SlurmHost(name="c", gpus=3, cpus=8, state="idle")]


def test_steps_have_names():
    assert answering("12.batch batch\n13.0 rw-0-1\n").list_steps([12, 13])[1] == SlurmStep(
        step_id="13.0", name="rw-0-1"
    )


def test_the_cluster_has_a_name():
    assert SlurmClient(FakeSlurm().run).cluster_name() == "alps"


def test_a_refusal_is_told_in_slurms_words():
    with pytest.raises(LaunchError, match=r"^sbatch: Batch job submission failed: Invalid account, expected Slurm to"):
        answering(err="sbatch: error: Batch job submission failed: Invalid account\n", code=1).submit_script("", {})


def test_no_slurm_is_told():
    def absent(argv, stdin, environ):
        raise FileNotFoundError(2, "No such file or directory", "sinfo")

    with pytest.raises(
        LaunchError, match=r"sinfo: .*expected Slurm to answer. Run it on a machine with Slurm's commands"
    ):
        SlurmClient(absent).list_hosts()


def test_a_controller_that_does_not_answer_is_no_job_that_is_gone():
    down = answering(err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", code=1)
    with pytest.raises(LaunchError, match="Unable to contact slurm controller"):
        down.get_allocation(10)
