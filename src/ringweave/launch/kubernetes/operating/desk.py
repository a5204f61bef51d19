"""The operator's desk: where the agents in the Pods fetch their orders and leave their reports, over HTTPS.

Pods have no rights in the API server; an agent shows the token of its job's Secret, and says no more than what it does
itself. What it says is written into its Pod's status, where the next operator finds it.
"""

import asyncio
import hashlib
import hmac
from base64 import b64decode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from aiohttp import web
from pydantic import TypeAdapter

from ringweave.errors import LaunchError
from ringweave.jobs.life.observing import Phase
from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Orders, Report
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.certificates import ServerCertificate
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects import configs, seeing
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.kubernetes.operating.deposits import Depositor, Deposits, PassedError, TurnedDownError
from ringweave.launch.kubernetes.operating.looking import Look
from ringweave.launch.kubernetes.resource import times

POLL_S = 25.0
"""How long a question for orders is kept open; proxies end what is silent for a minute."""
RESULT_S = 10.0
"""Between two writes for a Pod that differ in nothing but how far its workers are."""
REREAD_S = 2.0
"""Between two reads of a job's Secret because of a token that is not the one known."""
TAG = "X-Ringweave-Orders"
_MOST_BYTES = 2**20 + 2**16
"""Of a request: credentials of all workers, or the end of a log, in what an object of the API server can hold."""
_AT_GATE = (Phase.READY, Phase.RUNNING, Phase.SUCCEEDED)
PodKey = tuple[str, str, int, int]
"""Namespace, job, node, attempt."""


@dataclass(slots=True)
class _Place:
    """What the desk knows of one Pod."""

    orders: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    told: Report | None = None
    told_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Token:
    """The token of a job as its Secret had it."""

    uid: str
    """Of the job."""
    text: str
    read_s: float


class Desk:
    """Answers agents; lives in the operator's event loop."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        """`clock` tells seconds since 1970."""
        self._client, self._clock = client, clock
        self._deposits = Deposits(client)
        self._places: dict[PodKey, _Place] = {}
        self._tokens: dict[tuple[str, str], _Token] = {}
        """By namespace and job."""
        self._uids: dict[tuple[str, str], str] = {}

    def note(self, look: Look) -> None:
        """Give out what a look at a job means for its Pods."""
        owner, opening = look.owner, look.seen.opening
        job = (owner.namespace, owner.name)
        self._uids[job] = owner.uid
        if look.seen.config is None:
            self._tokens.pop(job, None)  # its Secret goes with it; the next one has another token
        current = {(*job, *key): pod for key, pod in look.seen.pods.items()}
        for key in [key for key in self._places if key[:2] == job and key not in current]:
            self._set(key, Orders(round=0, leave=True, why="its Pod is gone"))
            del self._places[key]
        for key, pod in current.items():
            metadata = pod["metadata"]
            is_to_go = "deletionTimestamp" in metadata or names.STOPPED in metadata.get("annotations", {})
            why = "it was stopped" if is_to_go else ""
            self._set(key, Orders(round=seeing.round_of(pod), opening=opening, leave=is_to_go, why=why))

    def forget(self, job: tuple[str, str]) -> None:
        """A job (namespace, name) that is gone."""
        self._uids.pop(job, None)
        self._tokens.pop(job, None)
        for key in [key for key in self._places if key[:2] == job]:
            del self._places[key]

    async def serve(self, host: str, port: int, certificate: ServerCertificate | None) -> web.AppRunner:
        """Begin to answer; the runner's `addresses` say where, its `cleanup` ends it."""
        app = web.Application(client_max_size=_MOST_BYTES)
        path = r"/v1/{namespace}/{job}/{node:\d{1,9}}/{attempt:\d{1,9}}"
        app.router.add_get(path + "/orders", self._give_orders)
        app.router.add_put(path + "/report", self._take_report)
        app.router.add_put(path + r"/credentials/{round:\d{1,9}}", self._lodge)
        app.router.add_get(path + r"/credentials/{round:\d{1,9}}", self._give_lodged)
        app.router.add_put(path + r"/spares/{round:\d{1,9}}/{of:\d{1,9}}", self._lodge_spares)
        app.router.add_post(path + r"/spares/{round:\d{1,9}}", self._give_spares)
        app.router.add_put(path + "/log", self._keep_log)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, host, port, ssl_context=certificate.context() if certificate else None).start()
        return runner

    def _set(self, key: PodKey, orders: Orders) -> None:
        place = self._places.setdefault(key, _Place())
        text = posts.dump_orders(orders)
        if text != place.orders:
            place.orders = text
            place.changed.set()
            place.changed = asyncio.Event()

    async def _give_orders(self, request: web.Request) -> web.Response:
        key = await self._admitted(request)
        place = self._places.get(key)
        if place is None:
            return web.Response(status=404, text="no such Pod is known; ask again")
        known = request.headers.get(TAG)
        if _tag(place.orders) == known:
            try:
                async with asyncio.timeout(POLL_S):
                    await place.changed.wait()
            except TimeoutError:
                return web.Response(status=204)
        return web.Response(text=place.orders, headers={TAG: _tag(place.orders)}, content_type="application/json")

    async def _take_report(self, request: web.Request) -> web.Response:
        key = await self._admitted(request)
        try:
            report = posts.parse_report(await request.read())
        except ValueError:
            return web.Response(status=400, text="no report")
        place = self._places.get(key)
        if place is None:
            return web.Response(status=404, text="no such Pod is known; ask again")
        report = self._on_our_clock(place, report)
        if self._is_worth_writing(place, report):
            try:
                await self._write(key, report)
            except ApiError as error:
                return web.Response(status=410 if error.is_gone else 503, text=str(error))
            except LaunchError as error:
                return web.Response(status=503, text=str(error))
            place.told, place.told_s = report, self._clock()
        return web.Response(status=204)

    async def _lodge(self, request: web.Request) -> web.Response:
        by, round_ = await self._visit(request)
        texts = await _texts(request)
        return _no_texts() if texts is None else await _answered(self._deposits.lodge(by, round_, texts))

    async def _lodge_spares(self, request: web.Request) -> web.Response:
        by, round_ = await self._visit(request)
        node, texts = int(request.match_info["of"]), await _texts(request)
        return _no_texts() if texts is None else await _answered(self._deposits.lodge_spares(by, round_, node, texts))

    async def _give_lodged(self, request: web.Request) -> web.Response:
        by, round_ = await self._visit(request)
        return await _given(self._deposits.lodged(by.owner, round_, request.query.get("ranks", "").split(",")), round_)

    async def _give_spares(self, request: web.Request) -> web.Response:
        by, round_ = await self._visit(request)
        return await _given(self._deposits.take_spares(by, round_, request.query.get("holders", "").split(",")), round_)

    async def _keep_log(self, request: web.Request) -> web.Response:
        by = self._depositor(await self._admitted(request))
        text = (await request.read()).decode("utf-8", "replace")
        return await _answered(self._deposits.keep_log(by, text))

    async def _visit(self, request: web.Request) -> tuple[Depositor, int]:
        """Who comes for credentials, and of which round."""
        return self._depositor(await self._admitted(request)), int(request.match_info["round"])

    def _depositor(self, key: PodKey) -> Depositor:
        namespace, job, node, attempt = key
        owner = Owner(name=job, namespace=namespace, uid=self._uids.get(key[:2], ""))
        return Depositor(owner=owner, node=node, attempt=attempt)

    def _on_our_clock(self, place: _Place, report: Report) -> Report:
        """An end counts from when it was first heard of: the clock of its node may be another one."""
        if report.ended_s is None:
            return report
        told = place.told
        is_known = told is not None and (told.round, told.phase) == (report.round, report.phase)
        return replace(report, ended_s=told.ended_s if told is not None and is_known else self._clock())

    def _is_worth_writing(self, place: _Place, report: Report) -> bool:
        told = place.told
        is_same = told is not None and (told.round, told.phase) == (report.round, report.phase)
        return not is_same or (told != report and self._clock() - place.told_s >= RESULT_S)

    async def _write(self, key: PodKey, report: Report) -> None:
        namespace, job, node, attempt = key
        condition = condition_of(report, self._clock())
        body = {"status": {"conditions": [condition]}}
        await self._client.patch(kinds.PODS, namespace, names.pod(job, node, attempt), body, subresource="status")

    async def _admitted(self, request: web.Request) -> PodKey:
        found = request.match_info
        key = (found["namespace"], found["job"], int(found["node"]), int(found["attempt"]))
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not await self._is_token(key[:2], shown):
            raise web.HTTPForbidden(text="not the token of this job")
        return key

    async def _is_token(self, job: tuple[str, str], shown: str) -> bool:
        """It is the token of a job that is led by this operator."""
        uid = self._uids.get(job)
        if uid is None:
            return False
        known = self._tokens.get(job)
        if known is None or known.uid != uid:
            known = await self._read_token(job, uid, before=None)
        elif not _is_same(shown, known.text) and not 0 <= self._clock() - known.read_s < REREAD_S:
            # A Secret that was made anew under the same job (resume, retry), between two looks.
            known = await self._read_token(job, uid, before=known)
        return known is not None and _is_same(shown, known.text)

    async def _read_token(self, job: tuple[str, str], uid: str, before: _Token | None) -> _Token | None:
        """The token as the Secret has it now; the one from before where the Secret cannot be read."""
        if before is not None:
            self._tokens[job] = replace(before, read_s=self._clock())  # who asks meanwhile does not read it too
        try:
            found = await self._client.get(kinds.SECRETS, job[0], names.config(job[1]))
        except LaunchError:
            return before
        text = b64decode(found["data"][configs.TOKEN]).decode()
        known = _Token(uid=uid, text=text, read_s=self._clock())
        if self._uids.get(job) == uid:
            self._tokens[job] = known
        return known


def condition_of(report: Report, now: float) -> dict[str, str | None]:
    """What an agent said, as a condition of its Pod."""
    return {
        "type": names.AT_GATE,
        "status": "True" if report.phase in _AT_GATE else "False",
        "reason": str(report.phase),
        "message": posts.dump_report(report),
        "lastProbeTime": None,
        "lastTransitionTime": times.show(now),
    }


async def _answered(work: Awaitable[None]) -> web.Response:
    """204 when it is done; else why not, and whether to try again."""
    try:
        await work
    except LaunchError as error:
        return _refused(error)
    return web.Response(status=204)


async def _given(work: Awaitable[dict[str, str] | None], round_: int) -> web.Response:
    """The credentials; else whether it helps to ask again."""
    try:
        texts = await work
    except PassedError as error:
        return web.Response(status=410, text=str(error))
    except LaunchError as error:
        return _refused(error)
    if texts is None:
        return web.Response(status=404, text=f"nobody has lodged credentials of round {round_}; ask again")
    return web.json_response(texts)


async def _texts(request: web.Request) -> dict[str, str] | None:
    """The credentials that are brought; None where they are none."""
    try:
        return _TEXTS.validate_json(await request.read())
    except ValueError:
        return None


def _no_texts() -> web.Response:
    return web.Response(status=400, text="no credentials")


def _refused(error: LaunchError) -> web.Response:
    is_final = isinstance(error, TurnedDownError) or (isinstance(error, ApiError) and error.is_refusal)
    return web.Response(status=409 if is_final else 503, text=str(error))


def _is_same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(), token.encode())


def _tag(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_TEXTS = TypeAdapter(dict[str, str])
