"""Leader election by a Lease: one operator works, and one that cannot renew stops before another can start."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ringweave.errors import LaunchError
from ringweave.platforms.kubernetes import api_client, names
from ringweave.platforms.kubernetes.api_client import KubernetesClient, Object
from ringweave.platforms.kubernetes.api_errors import ApiError
from ringweave.platforms.kubernetes.job_objects import JobKey

LEASE_NAME = "ringweave-operator"
LEASE_RELEASE_TIMEOUT_S = 2.0
"""Time for which an operator that ends tries to release its lease."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseSettings:
    """Settings of the operator's lease."""

    namespace: str
    identity: str
    """Identity of this operator; unchanged by a restart of its container, so that it continues at once."""
    duration_s: float = 15.0
    """A holder that has not renewed for this time has lost the lease."""
    renew_s: float = 4.0
    """Interval between renewals. A holder gives up one interval before its lease ends."""


class LostLeaseError(LaunchError):
    """Another operator leads, or may; this one has stopped."""


class LeaderElection:
    """Leader election by a Lease."""

    def __init__(
        self,
        client: KubernetesClient,
        settings: LeaseSettings,
        clock: Callable[[], float],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start as a follower.

        Args:
            client: Client for the lease.
            settings: Settings of the lease.
            clock: Seconds since 1970, for the times in the lease; never compared with another machine's.
            elapsed: Monotonic clock, in seconds, for the duration of the lease.
        """
        self._client, self._settings = client, settings
        self._clock, self._elapsed = clock, elapsed
        self._log = logging.getLogger(__name__)
        self._last_change: tuple[str, float] = ("", 0.0)
        """Version of the lease when it was last seen to change, and the time of that."""
        self._held_until_s = float("-inf")
        """End of our lease by `elapsed`: counted from before the renewal was sent, less one renewal interval."""

    @property
    def is_leader(self) -> bool:
        """Return whether the lease is ours, so that no other operator can have it yet."""
        return self._elapsed() < self._held_until_s

    async def wait_acquired(self) -> None:
        """Wait until the lease is ours, also while the API server is down or overloaded.

        Raises:
            ApiError: The API server does not accept our credentials, or we may not have the lease.
        """
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_s):
                    if await self._try_acquire():
                        return
            except (LaunchError, TimeoutError) as error:
                if isinstance(error, ApiError) and error.status in (401, 403):
                    raise
                why = str(error) or f"no answer in {self._settings.renew_s:g} s"
                self._log.warning("lease: not asked for: %s", why)
            await asyncio.sleep(min(self._settings.renew_s, self._settings.duration_s / 4))

    async def renew_until_lost(self) -> None:
        """Renew the lease while it is ours; return before another operator may start.

        Raises:
            LostLeaseError: The lease is not ours any more, or may not be.
        """
        while True:
            await asyncio.sleep(min(self._settings.renew_s, self._left_s()))
            try:
                async with asyncio.timeout(min(self._settings.renew_s, self._left_s())):
                    # Twice: a renewal of ours without a timely answer conflicts with the next one.
                    is_ours = await self._try_acquire() or await self._try_acquire()
            except (LaunchError, TimeoutError) as error:
                self._log.warning("lease: not renewed: %s", str(error) or "no answer")
                is_ours = None
            if is_ours is False or not self.is_leader:
                raise _lost_lease_error()

    def guard(self, reconcile: Callable[[JobKey], Awaitable[Result]]) -> Callable[[JobKey], Awaitable[Result]]:
        """Return the same work, started only while the lease is ours, so that a paused operator stays idle.

        Raises:
            LostLeaseError: The lease is not ours.
        """

        async def guarded(key: JobKey) -> Result:
            if not self.is_leader:
                raise _lost_lease_error()
            return await reconcile(key)

        return guarded

    def _left_s(self) -> float:
        return max(0.0, self._held_until_s - self._elapsed())

    async def release(self) -> None:
        """Release the lease for another operator; without a quick answer of the API server it has to expire."""
        self._held_until_s = float("-inf")
        try:
            async with asyncio.timeout(LEASE_RELEASE_TIMEOUT_S):
                lease = await self._client.get(api_client.LEASES, self._settings.namespace, LEASE_NAME)
                if lease["spec"].get("holderIdentity") == self._settings.identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._client.replace(api_client.LEASES, self._settings.namespace, lease)
        except (LaunchError, TimeoutError) as error:
            self._log.warning("lease: not released: %s", str(error) or "no answer")

    async def _try_acquire(self) -> bool:
        """Try to acquire or renew the lease; return whether it is ours."""
        begun_s = self._elapsed()
        is_ours = await self._write_if_available()
        if is_ours:
            self._held_until_s = begun_s + self._settings.duration_s - self._settings.renew_s
        return is_ours

    async def _write_if_available(self) -> bool:
        namespace = self._settings.namespace
        try:
            lease = await self._client.get(api_client.LEASES, namespace, LEASE_NAME)
        except ApiError as error:
            if not error.is_not_found:
                raise
            return await self._write_lease({"metadata": {"name": LEASE_NAME, "namespace": namespace}}, transitions=0)
        spec = lease.get("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._settings.identity) and not self._has_expired(lease):
            return False
        is_new = holder != self._settings.identity
        return await self._write_lease(lease, transitions=spec.get("leaseTransitions", 0) + is_new)

    def _has_expired(self, lease: Object) -> bool:
        """Return whether the lease was not renewed for its whole duration since we first saw this version."""
        version, now = lease["metadata"]["resourceVersion"], self._elapsed()
        if version != self._last_change[0]:
            self._last_change = (version, now)
        lasts_s = max(self._settings.duration_s, float(lease["spec"].get("leaseDurationSeconds") or 0))
        return now - self._last_change[1] > lasts_s

    async def _write_lease(self, lease: Object, *, transitions: int) -> bool:
        now = names.format_time_micro(self._clock())
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
            await write(api_client.LEASES, self._settings.namespace, {**lease, "spec": spec})
        except ApiError as error:
            if error.is_stale or error.already_exists:
                return False  # another one was faster
            raise
        return True


def _lost_lease_error() -> LostLeaseError:
    return LostLeaseError("lease of the operator: lost, expected to hold it. Another one leads now, or will.")
