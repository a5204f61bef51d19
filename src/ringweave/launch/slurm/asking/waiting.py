"""Why a job of Slurm waits, in words: what it waits for, and what would help. Pure.

Source: the reasons of squeue's manual page, Slurm 22.05 to 24.11; those that cannot come up here are left out.
"""

from collections.abc import Mapping

from ringweave.launch.slurm.asking.commands import Allocation

REASONS: Mapping[str, str] = {
    "None": "Slurm has not looked at it yet",
    "Resources": "the machines that it needs are in use; it goes on by itself when other jobs end (squeue shows them)",
    "Priority": "other jobs of its partition come first; it goes on by itself (squeue --start says when)",
    "BeginTime": "it was requeued, and Slurm waits until the machines have forgotten the former try; at most 2 minutes",
    "Dependency": "a job that it depends on has not ended",
    "JobHeldUser": "somebody holds it; scontrol release {job_id} lets it go",
    "JobHeldAdmin": "whoever runs the cluster holds it; ask them",
    "ReqNodeNotAvail": "a machine that it names is down, drained or reserved; sinfo -R says why. "
    "Leave its name out to take another, or have it mended",
    "PartitionDown": "its partition is down; sinfo shows others, SBATCH_PARTITION chooses one",
    "PartitionInactive": "its partition takes no jobs now; sinfo shows others, SBATCH_PARTITION chooses one",
    "PartitionNodeLimit": "it asks for more machines than its partition allows; ask for fewer nodes",
    "PartitionTimeLimit": "it asks for more time than its partition allows; set SBATCH_TIMELIMIT",
    "Reservation": "it waits for its reservation to begin",
    "Licenses": "it waits for a licence",
    "NodeDown": "a machine that it needs is down; sinfo -R says why",
    "BadConstraints": "no machine has what it asks for; see sinfo and ask for less",
    "InvalidAccount": "its account is not valid; set SBATCH_ACCOUNT",
    "InvalidQOS": "its quality of service is not valid; set SBATCH_QOS",
    "AssocGrpGRES": "the GPUs of its account are in use up to their limit; it goes on when jobs of the account end",
    "AssocGrpCpuLimit": "the CPUs of its account are in use up to their limit; it goes on when jobs of the account end",
    "AssocMaxJobsLimit": "the account has as many jobs as it may; it goes on when one of them ends",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as you may; it goes on when one of them ends",
    "QOSMaxGRESPerUser": "you have as many GPUs as you may; it goes on when one of your jobs ends",
    "QOSGrpGRES": "the GPUs of its quality of service are in use up to their limit",
    "launch_failed_requeued_held": "its start failed, and Slurm holds it; see sinfo -R, then scontrol release {job_id}",
    "job_requeued_in_held_state": "it was requeued and is held; scontrol release {job_id} lets it go",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": "machines that it "
    "needs are down, drained or reserved; sinfo -R says why. Have them mended, or ask for less",
}
"""Slurm's word -> what it means and what helps."""
_LIMIT = "a limit of account or quality of service is reached; sacctmgr show assoc says which"


def tell(allocation: Allocation) -> str:
    """What a waiting job waits for; Slurm's own word is in it."""
    word = allocation.reason.partition("(")[0].rstrip(",") or "None"
    known = REASONS.get(word) or REASONS.get(word.split(",")[0])
    if known is None:
        known = _LIMIT if word.startswith(("Assoc", "QOS")) else "see the job reason codes in squeue's manual"
    start = f". Slurm expects to start it at {allocation.start}" if allocation.start else ""
    return f"Slurm job {allocation.job_id} ({word}): {known.format(job_id=allocation.job_id)}{start}"
