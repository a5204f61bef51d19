"""Events of pipelines whose blocks move."""

from collections.abc import Mapping

from ringweave.telemetry.kind import RANK, Kind

_SPLITS = "last blocks, counted from 1, of all stages but the last"
_SPEEDS = "of each device: how fast it is by now, 1 is as profiled"
_RATES = "bytes per second of the link into each stage but the first; empty where links are not measured"

KINDS: Mapping[str, Kind] = {
    "pipeline_measured": Kind(
        meaning="A window of train steps of a pipeline, measured; rank 0 says so for all.",
        written_by="worker",
        fields={
            "rank": RANK,
            "first_step": "number of the window's first train step",
            "end_step": "number of the train step behind its last",
            "blocks": "how many blocks the model has",
            "splits": _SPLITS,
            "compute_s": "of each stage: seconds of computing in a train step, without waiting; medians",
            "speeds": _SPEEDS,
            "rates": _RATES,
            "measured_s": "seconds of a train step on rank 0, median",
            "predicted_s": "simulated seconds of a train step with these speeds and rates",
        },
    ),
    "partition_solved": Kind(
        meaning="Rank 0 looked for a better partition of a pipeline.",
        written_by="worker",
        fields={
            "rank": RANK,
            "splits": _SPLITS,
            "best": "splits of the best one found",
            "why": "why it looked, in words",
            "speeds": _SPEEDS,
            "rates": _RATES,
            "predicted_before_s": "simulated seconds of a train step by the present partition",
            "predicted_after_s": "the same by the best one",
            "predicted_pause_s": "seconds that training would stand still for the move",
            "verdict": "`move`, or why not, in words",
        },
    ),
    "blocks_moved": Kind(
        meaning="Blocks of a pipeline moved to other stages between two train steps; rank 0 says so for all.",
        written_by="worker",
        fields={
            "rank": RANK,
            "at_step": "number of the first train step under the new partition",
            "before": "splits that were",
            "after": "splits that hold now",
            "blocks": "how many blocks moved",
            "why": "why, in words",
            "is_return": "true if it took a move back that had not helped",
            "predicted_pause_s": "seconds that training was to stand still",
            "measured_pause_s": "seconds that the slowest rank spent on it while it did nothing else",
        },
    ),
    "move_failed": Kind(
        meaning="Blocks were to move and did not; the old partition holds on all ranks, and training goes on.",
        written_by="worker",
        fields={
            "rank": RANK,
            "at_step": "number of the next train step",
            "before": "splits that hold",
            "after": "splits that were to hold",
            "blocks": "how many blocks were to move",
            "why": "why they were to, in words",
            "is_return": "true if it was to take a move back",
            "cause": "what failed, in words",
        },
    ),
}
