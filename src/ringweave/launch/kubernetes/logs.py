"""What the workers of a job printed: kept logs of attempts whose Pods are gone, and those of Pods as they grow."""

import asyncio
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ringweave.errors import RingweaveError
from ringweave.jobs.life.advancing import is_over
from ringweave.jobs.life.observing import Cause
from ringweave.jobs.life.records import Job
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects import keeping, seeing
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.kubernetes.resource import reading
from ringweave.launch.services.service import LogLine, LogQuery

LOOK_S = 0.5
"""Between two looks for Pods that have come since."""
_LINE = re.compile(r"\[(\d+)\] (.*)", re.DOTALL)
_END = None
_LOST = "its Pod was removed by somebody else, and its log with it"


class Logs:
    """Reads the logs of one job."""

    def __init__(self, connect: Callable[[], Any], owner: Owner, job: Job, which: LogQuery) -> None:
        """`connect` says where the API server is, and as whom."""
        self._connect, self._owner, self._job, self._which = connect, owner, job, which
        self._found: queue.Queue[LogLine | RingweaveError | None] = queue.Queue(maxsize=10_000)
        self._hung_up = threading.Event()

    def read(self) -> Iterator[LogLine]:
        """The lines that are asked for; where they are followed, until the job has ended.

        Raises:
            LaunchError: The API server cannot be reached.
        """
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="logs", daemon=True)
        thread.start()
        try:
            while (each := self._found.get()) is not _END:
                if isinstance(each, RingweaveError):
                    raise each
                yield each
        finally:
            self._hung_up.set()

    async def _serve(self) -> None:
        try:
            async with Client(self._connect) as client:
                await self._all(client)
            await self._put(_END)
        except RingweaveError as error:
            await self._put(error)

    async def _all(self, client: Client) -> None:
        begun: set[seeing.Key] = set()
        tasks: list[asyncio.Task[None]] = []
        while True:
            is_over = not self._which.follow or await self._is_over(client)
            for key, log in await self._kept(client):
                if key not in begun:
                    begun.add(key)
                    await self._tell(key, log["data"][keeping.LOG].splitlines())
            for key, pod in await self._pods(client):
                if key not in begun and keeping.has_log(pod):
                    begun.add(key)
                    tasks.append(asyncio.create_task(self._stream(client, key, pod)))
                    if not self._which.follow:
                        await tasks[-1]
            if is_over or self._hung_up.is_set():
                break
            await asyncio.sleep(LOOK_S)
        await asyncio.gather(*tasks)
        await self._tell_lost(begun | {key for key, _ in await self._pods(client)})

    async def _tell_lost(self, known: set[seeing.Key]) -> None:
        """Attempts that ended by the place's doing, and of whose log nothing is left."""
        for node in self._job.used_nodes:
            record = self._job.record.nodes[node]
            for ended in (*record.history, *([record.ended] if record.ended else ())):
                key = (node, ended.attempt)
                if ended.cause is Cause.PLACE and key not in known and self._is_asked_for(key):
                    name = self._job.node_name(node)
                    await self._put(LogLine(node=name, attempt=ended.attempt, round=0, rank=None, text=_LOST))

    async def _kept(self, client: Client) -> Sequence[tuple[seeing.Key, Object]]:
        selector = f"{self._owner.selector},{keeping.LOG_LABEL}"
        found = await client.list(kinds.CONFIG_MAPS, self._owner.namespace, labelSelector=selector)
        return self._wanted(found)

    async def _pods(self, client: Client) -> Sequence[tuple[seeing.Key, Object]]:
        return self._wanted(await client.list(kinds.PODS, self._owner.namespace, labelSelector=self._owner.selector))

    def _wanted(self, found: Sequence[Object]) -> Sequence[tuple[seeing.Key, Object]]:
        """Those of this job that are asked for, oldest attempts first."""
        kept = []
        for each in found:
            key = seeing.key_of(each)
            if key is None or not self._owner.owns(each):
                continue
            if self._is_asked_for(key):
                kept.append((key, each))
        return sorted(kept, key=lambda pair: (pair[0][1], pair[0][0]))

    def _is_asked_for(self, key: seeing.Key) -> bool:
        """By node, attempt, and the node that a rank is of."""
        which, job = self._which, self._job
        first = sum(job.counts[: key[0]])
        is_node = which.node in (None, job.node_name(key[0]))
        has_rank = which.rank is None or first <= which.rank < first + job.counts[key[0]]
        return is_node and has_rank and which.attempt in (None, key[1])

    async def _stream(self, client: Client, key: seeing.Key, pod: Mapping[str, Any]) -> None:
        path = kinds.PODS.path(self._owner.namespace, pod["metadata"]["name"], "log")
        params = keeping.asked_for(follow="true") if self._which.follow else keeping.asked_for()
        round_ = 1
        try:
            async for line in client.lines(path, params):
                round_ = await self._take(key, round_, line)
                if self._hung_up.is_set():
                    return
        except ApiError as error:
            if error.status == 400 and not keeping.has_nothing_to_tell(error):
                await self._tell(key, [keeping.unread(error)])
            elif not keeping.has_nothing_to_tell(error):  # else kept logs have it, or will
                raise

    async def _tell(self, key: seeing.Key, lines: Sequence[str]) -> None:
        round_ = 1
        for line in lines:
            round_ = await self._take(key, round_, line)

    async def _take(self, key: seeing.Key, round_: int, line: str) -> int:
        """Tell a line if it is asked for; the round that the next one is of."""
        if line.startswith(keeping.ROUND):
            return int(line.removeprefix(keeping.ROUND))
        match = _LINE.match(line)
        # What no worker printed is the container's own (no Python in its image), or said of the log itself.
        rank, text = (int(match[1]), match[2]) if match else (None, line)
        if self._which.rank in (None, rank):
            node = self._job.node_name(key[0])
            await self._put(LogLine(node=node, attempt=key[1], round=round_, rank=rank, text=text))
        return round_

    async def _put(self, each: LogLine | RingweaveError | None) -> None:
        while not self._hung_up.is_set():
            try:
                self._found.put_nowait(each)
            except queue.Full:
                await asyncio.sleep(0.01)
            else:
                return

    async def _is_over(self, client: Client) -> bool:
        try:
            resource = await client.get(kinds.TRAINING_JOBS, self._owner.namespace, self._owner.name)
        except ApiError as error:
            if error.is_gone:
                return True
            raise
        self._job = reading.job_of(resource) or self._job
        return is_over(self._job)
