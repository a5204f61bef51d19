"""Kinds of events about what outlasts a fault: checkpoints, train steps that are counted, and the faults themselves."""

from collections.abc import Mapping

from ringweave.telemetry.kind import RANK, Kind

_TRAIN_STEP = "train steps that the state has seen"

LASTING_KINDS: Mapping[str, Kind] = {
    "checkpoint_saved": Kind(
        meaning="A checkpoint is on the disk, whole; training went on meanwhile.",
        written_by="worker",
        fields={
            "rank": RANK,
            "train_step": _TRAIN_STEP,
            "path": "the file; rank 0's has the state, the others' their random numbers",
            "bytes": "size of the tensors in it",
            "copy_s": "seconds that training waited while they were copied, measured",
            "write_s": "seconds that the disk took, measured",
        },
    ),
    "checkpoint_failed": Kind(
        meaning="A checkpoint could not be written. Training goes on, and those before it are as they were.",
        written_by="worker",
        fields={
            "rank": RANK,
            "train_step": _TRAIN_STEP,
            "folder": "where it should have gone",
            "text": "what the disk, or the system, said",
        },
    ),
    "checkpoint_refused": Kind(
        meaning="A checkpoint is damaged and was passed over; the one before it is tried.",
        written_by="worker",
        fields={"rank": RANK, "train_step": _TRAIN_STEP, "path": "the file", "text": "the error's text"},
    ),
    "checkpoint_loaded": Kind(
        meaning="Training goes on from a checkpoint. Each rank says so.",
        written_by="worker",
        fields={
            "rank": RANK,
            "train_step": _TRAIN_STEP,
            "path": "the file, or the rank that its bytes came from",
            "saved_world_size": "number of workers that saved it",
            "world_size": "number of workers that go on",
        },
    ),
    "worker_watched": Kind(
        meaning="A worker runs its script under `ringweave chaos`, which counts its train steps.",
        written_by="worker",
        fields={"rank": RANK, "node": "host name of the worker's node", "pid": "its process id"},
    ),
    "train_step_done": Kind(
        meaning="The optimizer of a worker has made a step, under `ringweave chaos`.",
        written_by="worker",
        fields={
            "rank": RANK,
            "steps_since_start": "steps that it has made since its process began",
        },
    ),
    "fault_begun": Kind(
        meaning="Chaos did something to the job.",
        written_by="chaos",
        fields={"fault": "the line of the script", "target": "what it hit, such as a process id or links"},
    ),
    "fault_lifted": Kind(meaning="Chaos took it back.", written_by="chaos", fields={"fault": "the line of the script"}),
    "chaos_ended": Kind(
        meaning="No fault comes any more; what the job does from here on does not count.",
        written_by="chaos",
        fields={"outcome": "`done`: the job was through; `stopped`: its time was over; `failed`: it was given up"},
    ),
}
