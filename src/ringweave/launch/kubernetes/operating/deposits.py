"""What agents leave at the desk for others: credentials for the workers of a round, and the log of a Pod that goes.

Nothing is made for a job that is being removed: whether it is, is asked before and after, since what clears it away
may come in between.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringweave.errors import LaunchError, explain
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects import keeping, lodging
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.kubernetes.operating import looking
from ringweave.launch.kubernetes.resource import reading


class TurnedDownError(LaunchError):
    """What an agent brings is not wanted any more, or cannot be taken; to bring it again does not help."""


class PassedError(LaunchError):
    """What is asked for was of a round that is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Depositor:
    """The Pod whose agent brings something."""

    owner: Owner
    """Its TrainingJob."""
    node: int
    attempt: int


class Deposits:
    """Keeps in the API server what is brought, so that it outlives this operator."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def lodge(self, by: Depositor, round_: int, texts: Mapping[str, str]) -> None:
        """Have the job's Secret hold these credentials, by global rank; those of a former turn go.

        Raises:
            TurnedDownError: The job is being removed, or a later attempt has lodged its own.
            ApiError: Somebody else does the same at this moment; it may be tried again.
        """
        await self._lodge(by, names.server(by.owner.name), round_, texts)

    async def lodge_spares(self, by: Depositor, round_: int, node: int, texts: Mapping[str, str]) -> None:
        """Have the Secret of a node hold these credentials, by `HOLDER.LIFE`; those of a former turn go.

        Raises:
            TurnedDownError: The job is being removed, a later attempt has lodged its own, or there is no such node.
            ApiError: Somebody else does the same at this moment; it may be tried again.
        """
        name = names.spares(by.owner.name, node)
        resource = await looking.resource(self._client, (by.owner.namespace, by.owner.name))
        if resource is not None and name not in lodging.secrets_of(resource):
            raise TurnedDownError(
                f"credentials of node {node}: job {by.owner.name} has no such node, or is not elastic"
            )
        await self._lodge(by, name, round_, texts)

    async def take_spares(self, by: Depositor, round_: int, holders: Sequence[str]) -> dict[str, str] | None:
        """The next credentials of each of these processes of the depositor's node, which nobody gets again.

        None where they are not there, or not yet.

        Raises:
            PassedError: Those of a later round have replaced them, or one of the processes has no more.
            ApiError: Somebody else takes some at this moment; it may be tried again.
        """
        found = await self._of_round(by.owner, names.spares(by.owner.name, by.node), round_)
        if found is None:
            return None
        keys = lodging.next_lives(found, holders)
        if missing := sorted(set(holders) - keys.keys()):
            raise PassedError(
                f"round {round_} of job {by.owner.name}: no credentials are left for {', '.join(missing)}"
            )
        texts = lodging.texts_of(found, set(keys.values()))
        metadata = found["metadata"]
        body = {
            # Of this look: what somebody else has taken meanwhile is not taken again.
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
            "data": dict.fromkeys(keys.values()),
        }
        await self._client.patch(kinds.SECRETS, metadata["namespace"], metadata["name"], body)
        return {holder: texts[key] for holder, key in keys.items()}

    async def lodged(self, owner: Owner, round_: int, ranks: Collection[str]) -> dict[str, str] | None:
        """The credentials of these workers for this round; None where they are not there, or not yet.

        Raises:
            PassedError: Those of a later round have replaced them.
        """
        found = await self._of_round(owner, names.server(owner.name), round_)
        return None if found is None else lodging.texts_of(found, ranks)

    async def keep_log(self, by: Depositor, text: str) -> None:
        """Keep what an attempt printed, unless it is kept already or its Pod stays to be asked.

        Raises:
            TurnedDownError: The job is being removed.
        """
        await self._check_wanted(by.owner)
        name = names.pod(by.owner.name, by.node, by.attempt)
        pod = await self._found(kinds.PODS, by.owner, name)
        if pod is not None and _stays(pod):
            return
        labels = {names.NODE_LABEL: str(by.node), names.ATTEMPT_LABEL: str(by.attempt)}
        body = keeping.log_map(by.owner, {"metadata": {"name": name, "labels": labels}}, text.splitlines())
        try:
            made = await self._client.create(kinds.CONFIG_MAPS, by.owner.namespace, body)
        except ApiError as error:
            if not error.is_taken:
                raise
            return
        await self._check_still_wanted(by.owner, kinds.CONFIG_MAPS, made)

    async def _lodge(self, by: Depositor, name: str, round_: int, texts: Mapping[str, str]) -> None:
        turn = (round_, by.attempt)
        found = await self._secret(by.owner, name)
        if found is not None and lodging.turn_of(found) > turn:
            raise TurnedDownError(f"credentials of round {round_}: those of a later attempt are there")
        await self._check_wanted(by.owner)
        if found is not None:
            await self._delete(kinds.SECRETS, found)
        body = lodging.secret(by.owner, name, turn, texts)
        made = await self._client.create(kinds.SECRETS, by.owner.namespace, body)
        await self._check_still_wanted(by.owner, kinds.SECRETS, made)

    async def _of_round(self, owner: Owner, name: str, round_: int) -> Object | None:
        """The Secret, if it is of this round; None where there is none, or not yet."""
        found = await self._secret(owner, name)
        latest = 0 if found is None else lodging.turn_of(found)[0]
        if latest > round_:
            raise PassedError(f"round {round_} of job {owner.name} is over: round {latest} has begun")
        return found if latest == round_ else None

    async def _secret(self, owner: Owner, name: str) -> Object | None:
        found = await self._found(kinds.SECRETS, owner, name)
        if found is not None and not owner.owns(found):
            do = f"Remove the Secret, or give the job {owner.name} another name"
            text = explain(f"Secret {name}", got="somebody else's", expected=f"none, or one of job {owner.name}", do=do)
            raise TurnedDownError(text)
        return found

    async def _found(self, kind: kinds.Kind, owner: Owner, name: str) -> Object | None:
        try:
            return await self._client.get(kind, owner.namespace, name)
        except ApiError as error:
            if error.is_gone:
                return None
            raise

    async def _check_still_wanted(self, owner: Owner, kind: kinds.Kind, made: Object) -> None:
        try:
            await self._check_wanted(owner)
        except TurnedDownError:
            await self._delete(kind, made)
            raise

    async def _check_wanted(self, owner: Owner) -> None:
        resource = await looking.resource(self._client, (owner.namespace, owner.name))
        job = reading.job_of(resource) if resource is not None and resource["metadata"]["uid"] == owner.uid else None
        if job is None or job.desired.delete or job.record.deleting:
            raise TurnedDownError(f"job {owner.name}: it is being removed")

    async def _delete(self, kind: kinds.Kind, found: Mapping[str, Any]) -> None:
        metadata = found["metadata"]
        await self._client.delete(kind, metadata["namespace"], metadata["name"], preconditions={"uid": metadata["uid"]})


def _stays(pod: Mapping[str, Any]) -> bool:
    """It was stopped by the operator and is kept: the kubelet has its log."""
    metadata = pod["metadata"]
    return names.STOPPED in metadata.get("annotations", {}) and "deletionTimestamp" not in metadata
