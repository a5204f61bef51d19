"""Leadership by a Lease: of several operators one works, and one that cannot renew stops before another may begin."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ringweave.errors import LaunchError
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.operating.looking import Key
from ringweave.launch.kubernetes.resource import times

NAME = "ringweave-operator"
RELEASE_S = 2.0
"""How long an operator that ends tries to give its lease back."""
Result = TypeVar("Result")


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

    def __init__(
        self,
        client: Client,
        settings: LeaseSettings,
        clock: Callable[[], float],
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody's yet.

        Args:
            client: Reads and writes the lease.
            settings: Whose it is, and how long it lasts.
            clock: Seconds since 1970, for the times in the lease; never compared with another machine's.
            elapsed: Seconds of a clock that nobody sets, by which a lease is counted.
        """
        self._client, self._settings = client, settings
        self._clock, self._elapsed = clock, elapsed
        self._log = logging.getLogger(__name__)
        self._seen: tuple[str, float] = ("", 0.0)
        """The lease's version when it was last seen to change, and when that was."""
        self._until_s = float("-inf")
        """It is ours so long, by `elapsed`: counted from before the renewal was sent, less one renewal."""

    @property
    def holds(self) -> bool:
        """The lease is ours, and nobody else can have it yet."""
        return self._elapsed() < self._until_s

    async def acquire(self) -> None:
        """Wait until the lease is ours, also while the API server is away or has too much to do.

        Raises:
            ApiError: We are nobody there, or may not have it.
        """
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_s):
                    if await self._try():
                        return
            except (LaunchError, TimeoutError) as error:
                if isinstance(error, ApiError) and error.status in (401, 403):
                    raise
                why = str(error) or f"no answer in {self._settings.renew_s:g} s"
                self._log.warning("lease: not asked for: %s", why)
            await asyncio.sleep(min(self._settings.renew_s, self._settings.duration_s / 4))

    async def keep(self) -> None:
        """Renew it as long as it is ours; ends before another one may begin.

        Raises:
            LostLeaseError: It is not ours any more, or may not be.
        """
        while True:
            await asyncio.sleep(min(self._settings.renew_s, self._left_s()))
            try:
                async with asyncio.timeout(min(self._settings.renew_s, self._left_s())):
                    # Once more: a renewal of ours that was not answered in time conflicts with the next one.
                    is_ours = await self._try() or await self._try()
            except (LaunchError, TimeoutError) as error:
                self._log.warning("lease: not renewed: %s", str(error) or "no answer")
                is_ours = None
            if is_ours is False or not self.holds:
                raise _lost()

    def guarding(self, reconcile: Callable[[Key], Awaitable[Result]]) -> Callable[[Key], Awaitable[Result]]:
        """The same work, begun only while the lease is ours: an operator that stood still does nothing afterwards.

        Raises:
            LostLeaseError: It is not.
        """

        async def guarded(key: Key) -> Result:
            if not self.holds:
                raise _lost()
            return await reconcile(key)

        return guarded

    def _left_s(self) -> float:
        return max(0.0, self._until_s - self._elapsed())

    async def release(self) -> None:
        """Let another one begin at once; where the API server does not answer soon it has to wait."""
        self._until_s = float("-inf")
        try:
            async with asyncio.timeout(RELEASE_S):
                lease = await self._client.get(kinds.LEASES, self._settings.namespace, NAME)
                if lease["spec"].get("holderIdentity") == self._settings.identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._client.replace(kinds.LEASES, self._settings.namespace, lease)
        except (LaunchError, TimeoutError) as error:
            self._log.warning("lease: not released: %s", str(error) or "no answer")

    async def _try(self) -> bool:
        """Whether the lease is ours now; it was renewed if it was."""
        begun_s = self._elapsed()
        is_ours = await self._take()
        if is_ours:
            self._until_s = begun_s + self._settings.duration_s - self._settings.renew_s
        return is_ours

    async def _take(self) -> bool:
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
        version, now = lease["metadata"]["resourceVersion"], self._elapsed()
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


def _lost() -> LostLeaseError:
    return LostLeaseError("lease of the operator: lost, expected to hold it. Another one leads now, or will.")
