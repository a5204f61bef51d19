"""Leadership by a Lease: of several operators one works, and one that cannot renew stops before another may begin."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ringweave.errors import LaunchError
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.resource import times

NAME = "ringweave-operator"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseSettings:
    """Whose lease it is, and how long it lasts."""

    namespace: str
    identity: str
    """Of this operator; the same after a restart of its container, so that it goes on at once."""
    duration_s: float = 15.0
    """A holder that has not renewed for so long has lost it."""
    renew_s: float = 4.0
    """From one renewal to the next; a holder gives up one of them before its lease ends."""


class LostLeaseError(LaunchError):
    """Another operator leads, or may; this one has stopped."""


class Leader:
    """Holds the lease, or waits for it."""

    def __init__(self, client: Client, settings: LeaseSettings, clock: Callable[[], float]) -> None:
        """`clock` tells seconds since 1970; it is never compared with another machine's."""
        self._client, self._settings, self._clock = client, settings, clock
        self._log = logging.getLogger(__name__)
        self._seen: tuple[str, float] = ("", 0.0)
        """The lease's version when it was last seen to change, and when that was."""

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        while not await self._try():
            await asyncio.sleep(min(self._settings.renew_s, self._settings.duration_s / 4))

    async def keep(self) -> None:
        """Renew it as long as it is ours.

        Raises:
            LostLeaseError: It is not any more, or may not be.
        """
        renewed_s = self._clock()
        while True:
            await asyncio.sleep(self._settings.renew_s)
            try:
                async with asyncio.timeout(self._settings.renew_s):
                    is_ours = await self._try()
            except (LaunchError, TimeoutError) as error:
                self._log.warning("lease: %s", error)
                is_ours = None
            if is_ours:
                renewed_s = self._clock()
            last_s = renewed_s + self._settings.duration_s - self._settings.renew_s
            if is_ours is False or self._clock() > last_s:
                raise LostLeaseError(
                    "lease of the operator: lost, expected to hold it. Another one leads now, or will."
                )

    async def release(self) -> None:
        """Let another one begin at once."""
        try:
            lease = await self._client.get(kinds.LEASES, self._settings.namespace, NAME)
            if lease["spec"].get("holderIdentity") == self._settings.identity:
                lease["spec"]["holderIdentity"] = ""
                await self._client.replace(kinds.LEASES, self._settings.namespace, lease)
        except LaunchError as error:
            self._log.warning("lease: not released: %s", error)

    async def _try(self) -> bool:
        """Whether the lease is ours now; it was renewed if it was."""
        namespace = self._settings.namespace
        try:
            lease = await self._client.get(kinds.LEASES, namespace, NAME)
        except ApiError as error:
            if not error.is_gone:
                raise
            return await self._write({"metadata": {"name": NAME, "namespace": namespace}}, transitions=0)
        spec = lease.get("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._settings.identity) and not self._is_over(lease):
            return False
        is_new = holder != self._settings.identity
        return await self._write(lease, transitions=spec.get("leaseTransitions", 0) + is_new)

    def _is_over(self, lease: Object) -> bool:
        """Nobody has renewed it since we first saw it so, for as long as it lasts."""
        version, now = lease["metadata"]["resourceVersion"], self._clock()
        if version != self._seen[0]:
            self._seen = (version, now)
        lasts_s = max(self._settings.duration_s, float(lease["spec"].get("leaseDurationSeconds") or 0))
        return now - self._seen[1] > lasts_s

    async def _write(self, lease: Object, *, transitions: int) -> bool:
        now = times.show_micro(self._clock())
        spec = lease.get("spec", {})
        is_held = spec.get("holderIdentity") == self._settings.identity
        spec = {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": max(1, round(self._settings.duration_s)),
            "acquireTime": spec.get("acquireTime", now) if is_held else now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        write = self._client.replace if "resourceVersion" in lease["metadata"] else self._client.create
        try:
            await write(kinds.LEASES, self._settings.namespace, {**lease, "spec": spec})
        except ApiError as error:
            if error.is_stale or error.is_taken:
                return False  # another one was faster
            raise
        return True
