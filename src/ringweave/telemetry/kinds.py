"""The table of event kinds: every event that exists, and the meaning of its fields.

`docs/reference/events.md` is generated from this table, and the writer refuses any event that is not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

EVENTS_FORMAT = 2
"""Version of the kinds and fields of events; `run_started` has it, and readers refuse attempts of another version."""

MAX_CLUSTER_TEXT = 64 * 1024
"""Characters of a cluster file in an event, as long as a line of output: 600 nodes, or 80 with 8 NICs and 8 GPUs."""
RANK_FIELD = "global rank of the worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventKind:
    """One kind of event."""

    meaning: str
    """Fact that an event of this kind records."""
    written_by: str
    """Process that writes it: the launcher, a worker's backend, a server of the job, or chaos."""
    fields: Mapping[str, str]
    """Name -> meaning of every field beside `time` and `kind`; all of them are present in every event of the kind."""


_TRAIN_STEP_FIELD = "train steps that the state has seen"

FAULT_KINDS: Mapping[str, EventKind] = {
    "checkpoint_saved": EventKind(
        meaning="A checkpoint is on the disk, whole; training went on meanwhile.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "train_step": _TRAIN_STEP_FIELD,
            "path": "the file; rank 0's has the state, the others' their random numbers",
            "bytes": "size of the tensors in it",
            "copy_s": "seconds that training waited while they were copied, measured",
            "write_s": "seconds that the disk took, measured",
        },
    ),
    "checkpoint_failed": EventKind(
        meaning="A checkpoint could not be written. Training goes on, and those before it are as they were.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "train_step": _TRAIN_STEP_FIELD,
            "folder": "where it should have gone",
            "text": "error of the disk or the system",
        },
    ),
    "checkpoint_refused": EventKind(
        meaning="A checkpoint is damaged, or of another format, and was passed over; the one before it is tried.",
        written_by="worker",
        fields={"rank": RANK_FIELD, "train_step": _TRAIN_STEP_FIELD, "path": "the file", "text": "the error's text"},
    ),
    "checkpoint_loaded": EventKind(
        meaning="Training goes on from a checkpoint. Each rank reports.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "train_step": _TRAIN_STEP_FIELD,
            "path": "the file, or the rank that its bytes came from",
            "saved_world_size": "number of workers that saved it",
            "world_size": "number of workers that go on",
        },
    ),
    "worker_watched": EventKind(
        meaning="A worker runs its script under `ringweave chaos`, which counts its train steps.",
        written_by="worker",
        fields={"rank": RANK_FIELD, "node": "host name of the worker's node", "pid": "its process id"},
    ),
    "train_step_done": EventKind(
        meaning="The optimizer of a worker has made a step, under `ringweave chaos`.",
        written_by="worker",
        fields={"rank": RANK_FIELD, "steps_since_start": "steps that it has made since its process began"},
    ),
    "fault_begun": EventKind(
        meaning="Chaos injected a fault.",
        written_by="chaos",
        fields={"fault": "the line of the script", "target": "target of the fault, such as a process id or links"},
    ),
    "fault_lifted": EventKind(
        meaning="Chaos lifted the fault.", written_by="chaos", fields={"fault": "the line of the script"}
    ),
    "chaos_ended": EventKind(
        meaning="No fault comes any more; the rest of the job is not judged.",
        written_by="chaos",
        fields={"outcome": "`done`: the job was done; `stopped`: its time was over; `failed`: it was given up"},
    ),
}

_SPLITS_FIELD = "last blocks, counted from 1, of all stages but the last"
_SPEEDS_FIELD = "present speed of each device; 1 is as profiled"
_RATES_FIELD = "bytes per second of the link into each stage but the first; empty where links are not measured"

PIPELINE_KINDS: Mapping[str, EventKind] = {
    "pipeline_measured": EventKind(
        meaning="A window of train steps of a pipeline, measured; rank 0 reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "first_step": "number of the window's first train step",
            "end_step": "number of the train step behind its last",
            "blocks": "how many blocks the model has",
            "splits": _SPLITS_FIELD,
            "compute_s": "of each stage: seconds of computing in a train step, without waiting; medians",
            "speeds": _SPEEDS_FIELD,
            "rates": _RATES_FIELD,
            "measured_s": "seconds of a train step on rank 0, median",
            "predicted_s": "simulated seconds of a train step with these speeds and rates",
        },
    ),
    "partition_solved": EventKind(
        meaning="Rank 0 looked for a better partition of a pipeline.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "splits": _SPLITS_FIELD,
            "best": "splits of the best one found",
            "why": "reason of the search, in words",
            "speeds": _SPEEDS_FIELD,
            "rates": _RATES_FIELD,
            "predicted_before_s": "simulated seconds of a train step by the present partition",
            "predicted_after_s": "the same by the best one",
            "predicted_pause_s": "seconds that training would pause for the move",
            "verdict": "`move`, or the reason against it, in words",
        },
    ),
    "blocks_moved": EventKind(
        meaning="Blocks of a pipeline moved to other stages between two train steps; rank 0 reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "at_step": "number of the first train step under the new partition",
            "before": "splits that were",
            "after": "splits that hold now",
            "blocks": "how many blocks moved",
            "why": "reason, in words",
            "is_return": "true if it took a move back that had not helped",
            "predicted_pause_s": "predicted pause of training, in seconds",
            "measured_pause_s": "seconds that the slowest rank spent on it while it did nothing else",
        },
    ),
    "move_failed": EventKind(
        meaning="Blocks were to move and did not; the old partition holds on all ranks, and training goes on.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "at_step": "number of the next train step",
            "before": "splits that hold",
            "after": "splits that were to hold",
            "blocks": "how many blocks were to move",
            "why": "reason of the move, in words",
            "is_return": "true if it was to take a move back",
            "cause": "cause of the failure, in words",
        },
    ),
}

RING_KINDS: Mapping[str, EventKind] = {
    "rings_formed": EventKind(
        meaning="Training goes on in rings with a parameter server between them; rank 0 reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "rings": "ranks of each ring, the fastest ring first; the first rank of each is its representative",
            "most_staleness_versions": "bound on staleness: no older push is applied, in versions",
        },
    ),
    "sites_formed": EventKind(
        meaning="Training in mode `local` begins in several sites; rank 0 reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "sites": "ranks of each site; the first rank of each is its leader",
            "inner_steps": "train steps of the first round",
            "inner_lr_factor": "factor of the script's learning rates in steps of the first site",
        },
    ),
    "outer_step": EventKind(
        meaning="The sites of mode `local` have done an outer step; rank 0 reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "number": "outer steps so far",
            "train_steps": "train steps so far, over all sites",
            "samples": "samples of each site in the round",
            "inner_steps": "inner steps of each site in the round",
            "computing_s": "seconds of the round's inner steps on each site, measured",
            "wait_s": "seconds that rank 0 waited for the exchange and for other sites, measured",
            "exchange_s": "seconds of the exchange on rank 0, which computes meanwhile but for the wait, measured",
            "blocked_s": "seconds of rank 0 for the outer step itself, measured",
            "sent_bytes": "bytes that each site has sent to each other site",
            "next_inner_steps": "train steps from now on in which each parameter gets one outer step",
        },
    ),
    "mode_reconsidered": EventKind(
        meaning="Under `--mode auto`, at the end of an epoch of the data: measured steps favour other rings.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "rings": "ranks of each ring; one ring of all ranks is synchronous training",
            "reason": "predictions for the present rings and for the others",
        },
    ),
}

_NODE_FIELD = "name of the worker's node in the cluster file"
_COLLECTIVE_FIELD = "kind of collective: allreduce, reduce-scatter, allgather or broadcast"
_PLAN_VERSION_FIELD = "number of the group's plan: 1 for the first, then 2, 3, ..."
_SERVER_NODE_FIELD = "name of the server's node in the cluster file"
_GROUP_FIELD = "name of the process group, the same on all its ranks"

_OWN_NODE_FIELD = "name of the worker's node in the cluster file; without one the host name"
_USAGE_FIELDS: Mapping[str, str] = {
    "throttled_s": "seconds for which the CPU quota of its control group stopped the process",
    "collections_s": "seconds of Python's garbage collections",
    "major_faults": "pages that had to be read from a disk",
    "memory_stall_s": "seconds in which a process of its control group, or of the machine, had to pause for want of "
    "memory, by the kernel's pressure stall information; 0 where there is none",
    "disk_stall_s": "the same for want of a disk",
    "read_bytes": "bytes that the process and its children have had read from a disk",
}

EVENT_KINDS: Mapping[str, EventKind] = {
    "run_started": EventKind(
        meaning="An attempt of a run begins; all events up to the next `run_started` belong to this attempt.",
        written_by="launcher; under torchrun by the first rank",
        fields={
            "format": f"version of the events of this attempt: {EVENTS_FORMAT}; readers refuse others",
            "attempt": "1 for the first run in this directory, then 2, 3, ...",
            "command": "the program and its arguments, as a list",
            "cluster": "name of the cluster; null under torchrun without a cluster file",
            "world_size": "number of workers",
            "cluster_text": f"cluster file, from rank 0's node; empty elsewhere or over {MAX_CLUSTER_TEXT} characters",
        },
    ),
    "worker_started": EventKind(
        meaning="The process of a worker was started.",
        written_by="launcher; under torchrun by the worker, once it is in the process group",
        fields={
            "rank": RANK_FIELD,
            "node": _NODE_FIELD,
            "local_rank": "index of the worker on its node",
            "pid": "process id, which is its process group and session as well",
        },
    ),
    "worker_exited": EventKind(
        meaning="The process of a worker ended.",
        written_by="launcher; under torchrun by its own process, for workers that failed",
        fields={
            "rank": RANK_FIELD,
            "node": _NODE_FIELD,
            "exit_code": "exit code, or null if a signal ended it",
            "signal": "name of the signal that ended it, or null",
            "stopped": "true if it ended after the launcher had begun to stop the workers",
        },
    ),
    "spare_ready": EventKind(
        meaning="A spare (`--spares`) has imported what the script needs, and waits to become a worker.",
        written_by="launcher",
        fields={"pid": "its process id", "import_s": "seconds of its imports, at low priority, measured"},
    ),
    "spare_used": EventKind(
        meaning="A spare became or forked the worker of a slot; `worker_started` comes right before it.",
        written_by="launcher",
        fields={
            "rank": RANK_FIELD,
            "member": "its name as a member, `SLOT.INCARNATION`",
            "pid": "process id of the worker",
            "waited_s": "seconds for which it had been ready, measured",
        },
    ),
    "workers_scaled": EventKind(
        meaning="An elastic run has answered a request of `ringweave scale` for another number of workers.",
        written_by="launcher",
        fields={
            "request_id": "identifier of the request",
            "workers": "new number of workers: ranks 0, 1, .. up to that number",
            "before": "number of workers until then",
            "starting": "ranks whose processes were started",
            "leaving": "ranks that were asked to leave after their train step",
            "refused": "reason of a refusal, in words; empty if the request was accepted",
        },
    ),
    "run_ended": EventKind(
        meaning="All workers have ended and nothing of them is left.",
        written_by="launcher; under torchrun by its own process",
        fields={
            "outcome": "`done`, `failed` or `interrupted`",
            "exit_code": "exit code of `ringweave run`",
            "wall_s": "seconds since the attempt's `run_started`",
            "cause": "first cause of a failure in words, or null",
        },
    ),
    "generation_begun": EventKind(
        meaning="A generation of the membership of an elastic job begins with these members and no others.",
        written_by="coordinator",
        fields={
            "term": "1 for the first coordinator, then one more for each that takes over",
            "number": "number of the generation, growing within a term; a proposal that failed leaves its number out",
            "reported_in_term": "term of the reporting coordinator: a later one if members went to another and back",
            "members": "names of the members by rank, `SLOT.INCARNATION`",
            "newcomers": "members that have to read the state of a peer first",
            "committed": "number of the last committed operation: a reduction, or a collective of the scripts",
            "part": "`ring N` where rings have memberships of their own; else empty",
        },
    ),
    "residuals_lost": EventKind(
        meaning="The residuals of these workers, which encoding had left of their gradients for the next step, are "
        "lost; the others keep theirs.",
        written_by="worker",
        fields={"rank": RANK_FIELD, "members": "names of these workers", "reason": "reason in words"},
    ),
    "wire_chosen": EventKind(
        meaning="Members of an elastic job have chosen, within `--max-loss-increase`, another format of gradients.",
        written_by="worker",
        fields={"rank": RANK_FIELD, "wire": "format", "reduction": "first in it", "members": "names", "reason": "why"},
    ),
    "members_caught_up": EventKind(
        meaning="Workers that joined a running job have caught up: they have done every step that the others have.",
        written_by="worker",
        fields={
            "rank": "0: the primary reports for all members",
            "reduction": "number of the first reduction that they waited for as the others did",
            "members": "names of these workers",
            "batch": "number of the first batch, counted through all epochs of the data, that they get samples of",
        },
    ),
    "samples_lost": EventKind(
        meaning="A reduction of gradients is committed without the samples of members that were lost before. Reported "
        "twice for one reduction, with the same members, if the primary may have died before it reported.",
        written_by="worker",
        fields={
            "rank": "0: the primary reports for all members",
            "reduction": "number of the reduction",
            "members": "members whose gradients are in it",
            "samples": "number of their samples",
            "lost": "number of samples of the batch that are in no gradient",
        },
    ),
    "samples_recomputed": EventKind(
        meaning="A reduction of gradients is committed without the samples of members that were lost before. The other "
        "members compute these samples in the same train step, whose next reduction has them. With `samples` 0 the "
        "step restarts: its gradients are discarded, which takes less time than to sum them. Reported twice for one "
        "reduction, with the same members, if the primary may have died before it reported.",
        written_by="worker",
        fields={
            "rank": "0: the primary reports for all members",
            "reduction": "number of the reduction that misses samples",
            "members": "members whose gradients are in it",
            "samples": "number of their samples",
            "missing": "number of samples that the members compute next",
        },
    ),
    "member_lost": EventKind(
        meaning="A process has left the membership, or was evicted.",
        written_by="coordinator",
        fields={
            "member": "its name",
            "reason": "reason, in words",
            "term": "term of the reporting coordinator; one that was cut off may report members that have left it",
        },
    ),
    "member_returned": EventKind(
        meaning="A lost process has sent a heartbeat before a generation began without it: it is a member as before.",
        written_by="coordinator",
        fields={"member": "its name", "term": "term of the reporting coordinator"},
    ),
    "standstill": EventKind(
        meaning="In a generation all members waited for each other, far longer than usual, without progress. The next "
        "generation begins with the same members. A fault of the network or of ringweave; worth a report.",
        written_by="coordinator",
        fields={"term": "term of the generation", "number": "number of the generation in that term"},
    ),
    "group_formed": EventKind(
        meaning="A process group was formed; its first rank reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "node": _NODE_FIELD,
            "members": "global ranks of the group, in group order",
            "nodes": "node names of the members, in the same order",
        },
    ),
    "network_measured": EventKind(
        meaning="The network between the nodes of a group was measured by probing, as no cluster file was given.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "nodes": "names of the nodes",
            "switches": "names of the switches that were found",
            "rates": "link name -> measured bytes per second",
            "slow": "the slowest part in words, or null where nothing is slow",
            "not_searched": "parts of the network that were not searched for, in words, or null",
            "wall_s": "seconds that measuring took",
            "age_s": "seconds since then: more than a minute if an earlier job's measurements were taken",
        },
    ),
    "schedule_agreed": EventKind(
        meaning="The ranks of a group compared their schedules, which are equal; the first rank reports.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "collective": _COLLECTIVE_FIELD,
            "schedule": "name of the schedule",
            "digest": "digest of the schedule's operations, equal on all ranks",
            "bytes": "size of the message it was chosen for",
        },
    ),
    "collectives": EventKind(
        meaning="Number of collectives that a rank has run so far. Cumulative: the last event of each rank and group "
        "counts.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "by_schedule": "schedule name -> `collectives` (how many), `bytes` (sum of their message sizes), "
            "`messages` (how many messages this rank sent)",
        },
    ),
    "plan_made": EventKind(
        meaning="A group's plan: the first rank's, which holds for all. One for each version.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "version": _PLAN_VERSION_FIELD,
            "rates": "link name -> measured bytes per second, for the links that differ from the cluster file",
            "bound_s_per_byte": "least time of any allreduce of the group, in seconds per byte of message",
            "binding": "cut or partition that sets the bound, in words",
        },
    ),
    "schedule_tuned": EventKind(
        meaning="The candidates for a collective and size were tried, and one was found to be the fastest.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "version": _PLAN_VERSION_FIELD,
            "collective": _COLLECTIVE_FIELD,
            "schedule": "name of the one that is taken from now on",
            "bytes": "size of the message of the last trial",
            "predicted_s": "schedule -> predicted seconds, null where nothing is predicted",
            "measured_s": "schedule -> measured seconds: median over its trials of the slowest rank",
            "trials": "number of trials, those that warm up included",
            "trials_s": "seconds of all trials, measured",
        },
    ),
    "plan_changed": EventKind(
        meaning="Collectives became slower or faster, a survey found other rates, and another plan holds from here on.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "version": "number of the group's new plan",
            "why": "observation, in words",
            "rates": "link name -> measured bytes per second, for the links that were found to have changed",
            "old_s": "expected seconds of the sizes in use as they ran before, at the rates of now",
            "new_s": "the same with the new plan, of the best of each size",
        },
    ),
    "schedule_measured": EventKind(
        meaning="Duration of collectives. The last event of each group, plan, collective, schedule, size and "
        "pipelining counts.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "group": _GROUP_FIELD,
            "version": _PLAN_VERSION_FIELD,
            "collective": _COLLECTIVE_FIELD,
            "schedule": "name of the schedule",
            "bytes": "size of the message",
            "num_segments": "segments that it was cut into",
            "lag": "rounds by which a segment trailed the one before",
            "window": "receives that were posted ahead",
            "ahead": "rounds by which a send could precede the piece waited for, null for any number",
            "predicted_s": "predicted seconds, null where nothing is predicted",
            "wire": "wire format of what passed slow links",
            "measured_s": "measured seconds on the first rank, waiting for late ranks included: median of the newest",
            "rounds": "how many were measured",
        },
    ),
    "training_prepared": EventKind(
        meaning="A script called `ringweave.prepare`; rank 0 reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "mode": "mode in which the workers train",
            "requested_mode": "mode that the script requested",
            "reason": "reason for this mode, in words",
            "batch_samples": "samples of a train step over all ranks",
            "shares": "samples of each rank in the first batch",
        },
    ),
    "iterations_done": EventKind(
        meaning="A script reported its progress (`ringweave.Iterations`); the last event of each node counts.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "iterations": "train steps done in all, those before a resumed checkpoint included",
            "total": "train steps that there will be, or null",
            "loss": "of the last one, or null",
        },
    ),
    "steps_measured": EventKind(
        meaning="Train steps of a rank in a window of one to ten seconds, measured; sums over the steps. Every rank "
        "reports.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "node": _OWN_NODE_FIELD,
            "steps": "number of steps",
            "samples": "samples that this rank has computed in them",
            "wall_s": "seconds of the steps, each from the request for its batch to the next one",
            "longest_s": "seconds of the longest one",
            "input_s": "seconds until the batch had arrived",
            "input_processor_s": "processor time of the script's thread in these; the rest it waited",
            "compute_s": "seconds of computing after that, without the update",
            "forward_s": "seconds of forward passes in these; 0 if they are not timed",
            "exchange_s": "seconds from the last gradient to the end of the backward pass: transfers, and waits for "
            "other ranks",
            "update_s": "seconds of the optimizer",
            "processor_s": "processor time of the process; 0 if unknown, as on accelerators",
            "memory_bytes": "resident memory of the process at the end",
            **_USAGE_FIELDS,
        },
    ),
    "traffic_measured": EventKind(
        meaning="Scheduled collectives of a rank in one group, in a window of one to ten seconds, measured. Every rank "
        "reports.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "node": _OWN_NODE_FIELD,
            "group": _GROUP_FIELD,
            "wall_s": "seconds of the window",
            "in_flight_s": "seconds of it in which a collective was in flight on this rank",
            "collectives": "number of collectives that ended in it",
            "bytes": "sum of their message sizes",
            "links": "rank of a peer -> `sent_bytes`, `busy_s` (seconds in which some of them were on the way) and "
            "`limited_s` (seconds of these in which the peer's process took no more), over all connections, by the "
            "kernel's counts for TCP; peers on the same node are left out",
            **_USAGE_FIELDS,
        },
    ),
    "shares_changed": EventKind(
        meaning="The shares of batches changed by measured speeds; rank 0 reports for all.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "batch": "number of the first batch with these shares, counted through all epochs",
            "shares": "samples of each rank in a whole batch",
            "predicted_before_s": "predicted computing time of the slowest rank with the shares that were",
            "predicted_after_s": "the same with the new shares",
        },
    ),
    "memory_limited": EventKind(
        meaning="The samples that a rank computes at once are limited by its memory: at first, and after each change.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "samples_at_once": "most samples that fit, predicted from measured use; a larger share is in microbatches",
            "memory_bytes": "memory that the rank may use; a tenth of it stays free",
            "fixed_bytes": "use without samples, measured; null if an error came before",
            "sample_bytes": "use of one more sample, measured; null if an error came before",
        },
    ),
    "samples_accounted": EventKind(
        meaning="An epoch of the data is complete; the samples given to all ranks were compared with its samples.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "epoch": "number of the epoch, from 0",
            "samples": "samples that all ranks together were given",
            "expected": "samples that the epoch has, from where it was resumed",
            "fingerprint": "of the samples given, 64 bits in hexadecimal, whatever their order",
            "expected_fingerprint": "of the samples that the epoch consists of",
            "by_rank": "samples of each rank",
            "exact": "true if every sample was given exactly once",
        },
    ),
    **RING_KINDS,
    "server_started": EventKind(
        meaning="The process of the job's parameter server was started.",
        written_by="launcher",
        fields={"node": _SERVER_NODE_FIELD, "pid": "its process id", "address": "`host:port` at which it listens"},
    ),
    "server_exited": EventKind(
        meaning="The process of the job's parameter server ended.",
        written_by="launcher",
        fields={
            "node": _SERVER_NODE_FIELD,
            "exit_code": "exit code, or null if a signal ended it",
            "signal": "name of the signal that ended it, or null",
            "stopped": "true if the launcher ended it, because the workers had ended",
        },
    ),
    "params_counted": EventKind(
        meaning="Work of the parameter server since it began; every few seconds, and at the end.",
        written_by="server",
        fields={
            "node": _SERVER_NODE_FIELD,
            "last": "true in the last one",
            "version": "version of the parameters: pushes applied",
            "staleness": "staleness in versions -> pushes that were that old",
            "pushes": "ring -> pushes applied",
            "samples": "samples that the pushes were computed on",
            "repeats": "pushes that came again and were not applied again",
            "received_bytes": "bytes of pushes received, without frames and encryption",
            "sent_bytes": "bytes of parameters sent, likewise",
            "most_peers": "most workers that were connected at once",
            "train_steps": "samples pushed, in steps of synchronous training",
            "memory_bytes": "bytes of tensors held, and of memory that they are received into and sent from",
            "rpc": "ring -> calls answered, failures, and mean and longest seconds from a call to its answer",
        },
    ),
    "params_leader_changed": EventKind(
        meaning="Another parameter server leads from here on, or the leader got or lost its standby.",
        written_by="server",
        fields={
            "node": _SERVER_NODE_FIELD,
            "server": "index of the server that leads: 0 or 1",
            "term": "counts leaders",
            "record": "number of the leadership record",
            "members": "servers that have every acknowledged push",
            "reason": "reason of the record",
        },
    ),
    "params_saved": EventKind(
        meaning="The parameter server wrote a snapshot of its state, while training went on.",
        written_by="server",
        fields={
            "node": _SERVER_NODE_FIELD,
            "version": "version of the parameters in it",
            "path": "the file",
            "seconds": "how long the writing took, measured",
        },
    ),
    **PIPELINE_KINDS,
    "communication_failed": EventKind(
        meaning="A collective could not be run; the worker gets the same text as an exception.",
        written_by="worker",
        fields={
            "rank": RANK_FIELD,
            "node": _NODE_FIELD,
            "group": _GROUP_FIELD,
            "text": "the error's text, naming the peer if known",
        },
    ),
    "rpc_refused": EventKind(
        meaning="A server refused a connection or a message. Each reason and host at once, then every ten seconds.",
        written_by="server, coordinator, member of an elastic job, worker of an encrypted run",
        fields={
            "service": "identity of the server: `ringweave://JOB/ROLE/NAME`",
            "peer": "address and port of the refused peer",
            "reason": "`certificate`, `revoked`, `handshake`, `token`, `identity`, `job`, `role`, `message`, ...",
            "text": "the error's text",
            "refusals": "refusals since the last event of this reason and host, this one included",
        },
    ),
    "records_gone": EventKind(
        meaning="Older events than the next ones are gone: the event log reached its limits.",
        written_by="process that removes them; a reader adds one",
        fields={"records": "how many"},
    ),
    **FAULT_KINDS,
}


def to_markdown() -> str:
    """Return the text of `docs/reference/events.md`."""
    sections = [_kind_section(name, kind) for name, kind in EVENT_KINDS.items()]
    return _MARKDOWN_HEAD + "\n".join(sections)


_MARKDOWN_HEAD = """# Events

`RUN_DIR/events.jsonl` holds one JSON object per line. Every event has `time` (seconds since 1970) and `kind`; the other
fields are those of its kind, all of them always present. Lines are appended whole, by several processes; a process that
is killed while it writes may leave one torn line, which readers skip. A further attempt in the same directory appends.
Its size is [limited](../how-to/see-what-goes-on.md#limits-of-logs): full files are set aside, and of the oldest events
measured windows are merged and all others kept.

This page is generated from `src/ringweave/telemetry/kinds.py`; `python tools/reference_pages.py` writes it.

"""


def _kind_section(name: str, kind: EventKind) -> str:
    rows = "\n".join(f"| `{field}` | {meaning} |" for field, meaning in kind.fields.items())
    return (
        f"## {name}\n\n{kind.meaning} Written by the {kind.written_by}.\n\n| field | meaning |\n| --- | --- |\n{rows}\n"
    )
