"""Kinds of events about training in rings."""

from collections.abc import Mapping

from ringweave.telemetry.kind import RANK, Kind

KINDS: Mapping[str, Kind] = {
    "rings_formed": Kind(
        meaning="Training goes on in rings with a parameter server between them; rank 0 says so for all.",
        written_by="worker",
        fields={
            "rank": RANK,
            "rings": "ranks of each ring, the fastest ring first; the first rank of each talks to the server",
            "most_staleness_versions": "no push is applied that is older, in versions",
        },
    ),
    "mode_reconsidered": Kind(
        meaning="Under `--mode auto`, at the end of an epoch: steps say that other rings would be faster; formed next.",
        written_by="worker",
        fields={
            "rank": RANK,
            "rings": "ranks of each ring; one ring of all ranks is synchronous training",
            "reason": "what was predicted for the present rings, and for those that were looked at beside them",
        },
    ),
}
