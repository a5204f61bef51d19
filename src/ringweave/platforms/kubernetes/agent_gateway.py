"""Agent gateway of the operator: HTTPS endpoint where agents read their desired state and send status and credentials.

Pods have no rights in the API server. An agent authenticates with the token in its job's Secret. The gateway writes an
agent's status into the status of its Pod, where the next operator finds it.

Uploads (credentials of a round, logs of Pods that end) are stored only while the job is not being removed. This is
checked before and after the write, since a removal may come in between.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import ssl
import tempfile
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import TypeAdapter

from ringweave import http_servers
from ringweave.accept_limits import ConnectionLimiter
from ringweave.errors import LaunchError, explain
from ringweave.files import file_io
from ringweave.http_servers import HTTP_LIMITS, HttpSite
from ringweave.jobs.records import GroupPhase
from ringweave.param_server.leadership import (
    LeadershipRecord,
    LogAnswer,
    RoundLeadership,
    append_to,
    dump_answer,
    parse_record,
)
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState
from ringweave.platforms.kubernetes import api_client, job_resource, objects, pod_logs, pod_status
from ringweave.platforms.kubernetes.action_executor import ObservedJob
from ringweave.platforms.kubernetes.api_client import ApiError, KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import JobOwner

CERTIFICATE_LIFETIME = timedelta(days=3650)
"""Pods get the certificate at their creation and run as long as their job."""
_BACKDATED = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCertificate:
    """Certificate and private key, as PEM."""

    certificate: str
    key: str = field(repr=False)

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads files only
            file.write(self.key + self.certificate)
            file.flush()
            context.load_cert_chain(file.name)
        return context


def issue_certificate(hosts: Sequence[str], now: datetime) -> ServerCertificate:
    """Return a new self-signed certificate for these host names and addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ringweave")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + CERTIFICATE_LIFETIME)
        .add_extension(x509.SubjectAlternativeName([_subject_alternative_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return ServerCertificate(
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(), key=private.decode()
    )


def _subject_alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class UploadRejectedError(LaunchError):
    """Upload that is not wanted any more or cannot be stored; a retry does not help."""


class RoundPassedError(LaunchError):
    """The requested credentials belong to a round that is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploader:
    """Pod whose agent uploads something."""

    owner: JobOwner
    """TrainingJob of the Pod."""
    node: int
    attempt: int


class CredentialStore:
    """Store for uploads, in the API server, so that they outlive this operator."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client

    async def store_credentials(self, uploader: Uploader, round_: int, node: int, texts: Mapping[str, str]) -> None:
        """Store credentials by `HOLDER.INCARNATION` in a node's Secret, in place of those of an earlier version.

        Raises:
            UploadRejectedError: The job is being removed, a later attempt has uploaded its own, or the node is unknown.
            ApiError: A concurrent upload; it may be tried again.
        """
        name = objects.credential_pool_name(uploader.owner.name, node)
        resource = await self._client.find(api_client.TRAINING_JOBS, uploader.owner.namespace, uploader.owner.name)
        if resource is not None and name not in objects.secret_names(resource):
            raise UploadRejectedError(
                f"credentials of node {node}: job {uploader.owner.name} has no such node, or needs none"
            )
        version = (round_, uploader.attempt)
        found = await self._find_secret(uploader.owner, name)
        if found is not None and objects.upload_version(found) > version:
            raise UploadRejectedError(f"credentials of round {round_}: credentials of a later attempt are stored")
        await self._check_job_wanted(uploader.owner)
        if found is not None:
            await self._client.delete_exactly(api_client.SECRETS, found)
        body = objects.credential_secret(uploader.owner, name, version, texts)
        made = await self._client.create(api_client.SECRETS, uploader.owner.namespace, body)
        await self._delete_if_unwanted(uploader.owner, api_client.SECRETS, made)

    async def take_credentials(self, uploader: Uploader, round_: int, holders: Sequence[str]) -> dict[str, str] | None:
        """Take the next credentials of each of these processes out of the node's Secret.

        None if they are not there, or not yet.

        Raises:
            RoundPassedError: A later round has replaced them, or one of the processes has none left.
            ApiError: A concurrent request takes some; it may be tried again.
        """
        found = await self._find_secret_of_round(
            uploader.owner, objects.credential_pool_name(uploader.owner.name, uploader.node), round_
        )
        if found is None:
            return None
        keys = objects.next_credential_keys(found, holders)
        if missing := sorted(set(holders) - keys.keys()):
            raise RoundPassedError(
                f"round {round_} of job {uploader.owner.name}: no credentials are left for {', '.join(missing)}"
            )
        texts = objects.credential_texts(found, set(keys.values()))
        metadata = found["metadata"]
        body = {
            # Of this read: credentials taken meanwhile by another request are not taken again.
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
            "data": dict.fromkeys(keys.values()),
        }
        await self._client.patch(api_client.SECRETS, metadata["namespace"], metadata["name"], body)
        return {holder: texts[key] for holder, key in keys.items()}

    async def archive_log(self, uploader: Uploader, text: str) -> None:
        """Archive the log of an attempt, unless it is archived already or its Pod is kept.

        Raises:
            UploadRejectedError: The job is being removed.
        """
        await self._check_job_wanted(uploader.owner)
        name = objects.pod_name(uploader.owner.name, uploader.node, uploader.attempt)
        pod = await self._client.find(api_client.PODS, uploader.owner.namespace, name)
        if pod is not None and _is_kept_pod(pod):
            return
        labels = {objects.NODE_LABEL: str(uploader.node), objects.ATTEMPT_LABEL: str(uploader.attempt)}
        body = pod_logs.log_config_map(
            uploader.owner, {"metadata": {"name": name, "labels": labels}}, text.splitlines()
        )
        try:
            made = await self._client.create(api_client.CONFIG_MAPS, uploader.owner.namespace, body)
        except ApiError as error:
            if not error.already_exists:
                raise
            return
        await self._delete_if_unwanted(uploader.owner, api_client.CONFIG_MAPS, made)

    async def _find_secret_of_round(self, owner: JobOwner, name: str, round_: int) -> Object | None:
        """Return the Secret if it is of this round; None if there is none, or not yet."""
        found = await self._find_secret(owner, name)
        latest = 0 if found is None else objects.upload_version(found)[0]
        if latest > round_:
            raise RoundPassedError(f"round {round_} of job {owner.name} is over: round {latest} has begun")
        return found if latest == round_ else None

    async def _find_secret(self, owner: JobOwner, name: str) -> Object | None:
        found = await self._client.find(api_client.SECRETS, owner.namespace, name)
        if found is not None and not owner.owns(found):
            do = f"Remove the Secret, or give the job {owner.name} another name"
            text = explain(
                f"Secret {name}", got="an object of another owner", expected=f"none, or one of job {owner.name}", do=do
            )
            raise UploadRejectedError(text)
        return found

    async def _delete_if_unwanted(self, owner: JobOwner, kind: api_client.ResourceKind, made: Object) -> None:
        try:
            await self._check_job_wanted(owner)
        except UploadRejectedError:
            await self._client.delete_exactly(kind, made)
            raise

    async def _check_job_wanted(self, owner: JobOwner) -> None:
        resource = await self._client.find(api_client.TRAINING_JOBS, owner.namespace, owner.name)
        job = (
            job_resource.job_from_resource(resource)
            if resource is not None and resource["metadata"]["uid"] == owner.uid
            else None
        )
        if job is None or job.desired.delete or job.record.deleting:
            raise UploadRejectedError(f"job {owner.name}: it is being removed")


def _is_kept_pod(pod: Mapping[str, Any]) -> bool:
    """Return whether the operator stopped the Pod and keeps it: then the kubelet has its log."""
    metadata = pod["metadata"]
    return objects.STOPPED_ANNOTATION in metadata.get("annotations", {}) and "deletionTimestamp" not in metadata


_MAX_STALE_READS = 5
"""Attempts at a change of an object that others change at the same time."""


class LeadershipStore:
    """Latest leadership record of each job's two parameter servers, in an annotation of its ConfigMap.

    The API server changes the ConfigMap only if it is still the one that was read, so of two records with one number
    the first counts.
    """

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client

    async def append(self, owner: JobOwner, round_: int, record: LeadershipRecord | None) -> LogAnswer:
        """Append a record if it is the next one; None only reads.

        Raises:
            UploadRejectedError: The job has no config any more.
            ApiError: The API server does not answer, or others change the ConfigMap. The record may be appended or not.
        """
        attempt = 0
        while True:
            found = await self._client.find(api_client.CONFIG_MAPS, owner.namespace, objects.config_name(owner.name))
            if found is None or not owner.owns(found):
                raise UploadRejectedError(f"leadership of job {owner.name}: it has no config, so no round runs")
            text = found["metadata"].get("annotations", {}).get(objects.LEADERSHIP_ANNOTATION)
            known = None if text is None else _LEADERSHIP_ADAPTER.validate_json(file_io.bounded(text))
            answer = append_to(known, round_, record)
            if record is None or not answer.is_appended or (known is not None and known.record == record):
                return answer
            try:
                await self._write(found, RoundLeadership(round=round_, record=record))
            except ApiError as error:
                attempt += 1
                if not error.is_stale or attempt == _MAX_STALE_READS:
                    raise
            else:
                return answer

    async def _write(self, found: Object, leadership: RoundLeadership) -> None:
        metadata = found["metadata"]
        annotations = {objects.LEADERSHIP_ANNOTATION: _LEADERSHIP_ADAPTER.dump_json(leadership).decode()}
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": annotations}}
        await self._client.patch(api_client.CONFIG_MAPS, metadata["namespace"], metadata["name"], body)


LONG_POLL_S = 25.0
"""Duration of a long poll for the desired state; proxies close a connection after a silent minute."""
PROGRESS_WRITE_INTERVAL_S = 10.0
"""Interval between two writes for a Pod that differ in training progress only."""
TOKEN_REREAD_INTERVAL_S = 2.0
"""Interval between two reads of a job's Secret that an unknown token causes."""
MAX_PENDING = 1024
"""Connections whose agents are not known yet: all agents of the cluster call an operator that takes over, at once."""
TAG_HEADER = "X-Ringweave-Tag"
_MAX_REQUEST_BYTES = 2**20 + 2**16
"""Maximum request size: all workers' credentials, or the end of a log, within the size of an API object."""
_AT_BARRIER_PHASES = (GroupPhase.READY, GroupPhase.RUNNING, GroupPhase.SUCCEEDED)
PodKey = tuple[str, str, int, int]
"""Namespace, job, node, attempt."""


@dataclass(slots=True)
class _PodState:
    """State of one Pod in the gateway."""

    desired_state: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    written_status: AgentStatus | None = None
    written_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _JobToken:
    """Token in a job's Secret."""

    uid: str
    text: str
    read_s: float


class AgentGateway:
    """Gateway for agents; lives in the operator's event loop."""

    def __init__(self, client: KubernetesClient, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since 1970."""
        self._client, self._clock = client, clock
        self._limiter = ConnectionLimiter(replace(HTTP_LIMITS, max_pending=MAX_PENDING))
        self._credential_store, self._leadership_store = CredentialStore(client), LeadershipStore(client)
        self._pod_states: dict[PodKey, _PodState] = {}
        self._tokens: dict[tuple[str, str], _JobToken] = {}
        """(namespace, job) -> token."""
        self._uids: dict[tuple[str, str], str] = {}

    def publish_desired_states(self, observed: ObservedJob) -> None:
        """Publish the desired states of a job's Pods after an observation."""
        owner, rendezvous = observed.owner, observed.objects.rendezvous
        job = (owner.namespace, owner.name)
        self._uids[job] = owner.uid
        if observed.objects.config is None:
            self._tokens.pop(job, None)  # its Secret is deleted too; the next one has another token
        current = {(*job, *key): pod for key, pod in observed.objects.pods.items()}
        for key in [key for key in self._pod_states if key[:2] == job and key not in current]:
            self._set_desired_state(key, DesiredState(round=0, stop=True, reason="its Pod was deleted"))
            del self._pod_states[key]
        for key, pod in current.items():
            metadata = pod["metadata"]
            must_leave = "deletionTimestamp" in metadata or objects.STOPPED_ANNOTATION in metadata.get(
                "annotations", {}
            )
            why = "it was stopped" if must_leave else ""
            self._set_desired_state(
                key,
                DesiredState(round=pod_status.requested_round(pod), rendezvous=rendezvous, stop=must_leave, reason=why),
            )

    def forget_job(self, job: tuple[str, str]) -> None:
        """Forget a job (namespace, name) that is gone."""
        self._uids.pop(job, None)
        self._tokens.pop(job, None)
        for key in [key for key in self._pod_states if key[:2] == job]:
            del self._pod_states[key]

    async def start_serving(
        self,
        host: str,
        port: int,
        certificate: ServerCertificate | None,
        leads: Callable[[], bool] = lambda: True,
    ) -> HttpSite:
        """Start serving. The site's `addresses` are the endpoints; its `cleanup` stops it.

        Requests get status 503 while `leads` returns False: agents repeat them, and reach the operator that leads then.
        """

        @web.middleware
        async def check_leading(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await handler(request) if leads() else web.Response(status=503, text="does not lead; retry")

        app = web.Application(client_max_size=_MAX_REQUEST_BYTES, middlewares=[check_leading])
        path = r"/v2/{namespace}/{job}/{node:\d{1,9}}/{attempt:\d{1,9}}"
        app.router.add_get(path + "/desired-state", self._get_desired_state)
        app.router.add_put(path + "/status", self._put_status)
        app.router.add_put(path + r"/credentials/{round:\d{1,9}}/{of:\d{1,9}}", self._put_credentials)
        app.router.add_post(path + r"/credentials/{round:\d{1,9}}", self._take_credentials)
        app.router.add_post(path + r"/leadership/{round:\d{1,9}}", self._append_leadership)
        app.router.add_put(path + "/log", self._put_log)
        context = certificate.ssl_context() if certificate else None
        return await http_servers.serve_application(
            app, self._limiter, (host, port), context=context, shutdown_timeout_s=0.1
        )

    def _set_desired_state(self, key: PodKey, desired: DesiredState) -> None:
        pod_state = self._pod_states.setdefault(key, _PodState())
        text = agent_channel.DESIRED_STATE_JSON.dump(desired)
        if text != pod_state.desired_state:
            pod_state.desired_state = text
            pod_state.changed.set()
            pod_state.changed = asyncio.Event()

    async def _get_desired_state(self, request: web.Request) -> web.Response:
        key = await self._authenticate(request)
        pod_state = self._pod_states.get(key)
        if pod_state is None:
            return web.Response(status=404, text="unknown Pod; retry")
        known = request.headers.get(TAG_HEADER)
        if _content_tag(pod_state.desired_state) == known:
            try:
                async with asyncio.timeout(LONG_POLL_S):
                    await pod_state.changed.wait()
            except TimeoutError:
                return web.Response(status=204)
        return web.Response(
            text=pod_state.desired_state,
            headers={TAG_HEADER: _content_tag(pod_state.desired_state)},
            content_type="application/json",
        )

    async def _put_status(self, request: web.Request) -> web.Response:
        key = await self._authenticate(request)
        try:
            status = agent_channel.STATUS_JSON.parse(await request.read())
        except ValueError:
            return web.Response(status=400, text="not a status")
        pod_state = self._pod_states.get(key)
        if pod_state is None:
            return web.Response(status=404, text="unknown Pod; retry")
        status = self._with_operator_time(pod_state, status)
        if self._should_write(pod_state, status):
            try:
                await self._write_condition(key, status)
            except ApiError as error:
                return web.Response(status=410 if error.is_not_found else 503, text=str(error))
            except LaunchError as error:
                return web.Response(status=503, text=str(error))
            pod_state.written_status, pod_state.written_s = status, self._clock()
        return web.Response(status=204)

    async def _put_credentials(self, request: web.Request) -> web.Response:
        uploader, round_ = self._uploader(await self._authenticate(request)), int(request.match_info["round"])
        try:
            texts = _CREDENTIAL_TEXTS_ADAPTER.validate_json(file_io.bounded(await request.read()))
        except ValueError:
            return web.Response(status=400, text="not credentials")
        node = int(request.match_info["of"])
        return await _upload_response(self._credential_store.store_credentials(uploader, round_, node, texts))

    async def _take_credentials(self, request: web.Request) -> web.Response:
        """Return the next credentials of these holders, else the error and whether to retry."""
        uploader, round_ = self._uploader(await self._authenticate(request)), int(request.match_info["round"])
        holders = request.query.get("holders", "").split(",")
        try:
            texts = await self._credential_store.take_credentials(uploader, round_, holders)
        except RoundPassedError as error:
            return web.Response(status=410, text=str(error))
        except LaunchError as error:
            return _error_response(error)
        if texts is None:
            return web.Response(status=404, text=f"no credentials of round {round_} were uploaded yet; retry")
        return web.json_response(texts)

    async def _append_leadership(self, request: web.Request) -> web.Response:
        """Append the record in the body; without one, return the latest."""
        uploader, round_ = self._uploader(await self._authenticate(request)), int(request.match_info["round"])
        text = (await request.read()).decode("utf-8", "replace")
        try:
            record = parse_record(text) if text else None
            answer = await self._leadership_store.append(uploader.owner, round_, record)
        except ValueError:
            return web.Response(status=400, text="not a leadership record")
        except LaunchError as error:
            return _error_response(error)
        return web.json_response(text=dump_answer(answer))

    async def _put_log(self, request: web.Request) -> web.Response:
        uploader = self._uploader(await self._authenticate(request))
        text = (await request.read()).decode("utf-8", "replace")
        return await _upload_response(self._credential_store.archive_log(uploader, text))

    def _uploader(self, key: PodKey) -> Uploader:
        namespace, job, node, attempt = key
        owner = JobOwner(name=job, namespace=namespace, uid=self._uids.get(key[:2], ""))
        return Uploader(owner=owner, node=node, attempt=attempt)

    def _with_operator_time(self, pod_state: _PodState, status: AgentStatus) -> AgentStatus:
        """Return the status with its end time on our clock, at its first arrival: the node's clock may differ."""
        if status.ended_s is None:
            return status
        written = pod_state.written_status
        is_known = written is not None and (written.round, written.phase) == (status.round, status.phase)
        return replace(status, ended_s=written.ended_s if written is not None and is_known else self._clock())

    def _should_write(self, pod_state: _PodState, status: AgentStatus) -> bool:
        written = pod_state.written_status
        is_same = written is not None and (written.round, written.phase) == (status.round, status.phase)
        return not is_same or (written != status and self._clock() - pod_state.written_s >= PROGRESS_WRITE_INTERVAL_S)

    async def _write_condition(self, key: PodKey, status: AgentStatus) -> None:
        namespace, job, node, attempt = key
        condition = barrier_condition(status, self._clock())
        body = {"status": {"conditions": [condition]}}
        await self._client.patch(
            api_client.PODS, namespace, objects.pod_name(job, node, attempt), body, subresource="status"
        )

    async def _authenticate(self, request: web.Request) -> PodKey:
        found = request.match_info
        key = (found["namespace"], found["job"], int(found["node"]), int(found["attempt"]))
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not await self._is_token(key[:2], shown):
            raise web.HTTPForbidden(text="not the token of this job")
        http_servers.admit(request, self._limiter)
        return key

    async def _is_token(self, job: tuple[str, str], shown: str) -> bool:
        """Return whether the text is the token of a job that this operator manages."""
        uid = self._uids.get(job)
        if uid is None:
            return False
        known = self._tokens.get(job)
        if known is None or known.uid != uid:
            known = await self._read_token(job, uid, before=None)
        elif not _tokens_equal(shown, known.text) and not 0 <= self._clock() - known.read_s < TOKEN_REREAD_INTERVAL_S:
            # The Secret of the same job was created again (resume, retry) between two passes.
            known = await self._read_token(job, uid, before=known)
        return known is not None and _tokens_equal(shown, known.text)

    async def _read_token(self, job: tuple[str, str], uid: str, before: _JobToken | None) -> _JobToken | None:
        """Return the current token of the Secret, or the one before if the Secret cannot be read."""
        if before is not None:
            self._tokens[job] = replace(before, read_s=self._clock())  # concurrent requests do not read it too
        try:
            found = await self._client.get(api_client.SECRETS, job[0], objects.config_name(job[1]))
        except LaunchError:
            return before
        text = b64decode(found["data"][objects.TOKEN_KEY]).decode()
        known = _JobToken(uid=uid, text=text, read_s=self._clock())
        if self._uids.get(job) == uid:
            self._tokens[job] = known
        return known


def barrier_condition(status: AgentStatus, now: float) -> dict[str, str | None]:
    """Return an agent's status as a condition of its Pod."""
    return {
        "type": objects.BARRIER_CONDITION,
        "status": "True" if status.phase in _AT_BARRIER_PHASES else "False",
        "reason": str(status.phase),
        "message": agent_channel.STATUS_JSON.dump(status),
        "lastProbeTime": None,
        "lastTransitionTime": objects.format_time(now),
    }


async def _upload_response(upload: Awaitable[None]) -> web.Response:
    """Return 204 after success, else the error and whether to retry."""
    try:
        await upload
    except LaunchError as error:
        return _error_response(error)
    return web.Response(status=204)


def _error_response(error: LaunchError) -> web.Response:
    is_final = isinstance(error, UploadRejectedError) or (isinstance(error, ApiError) and error.is_refusal)
    return web.Response(status=409 if is_final else 503, text=str(error))


def _tokens_equal(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(), token.encode())


def _content_tag(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_CREDENTIAL_TEXTS_ADAPTER = TypeAdapter(dict[str, str])
_LEADERSHIP_ADAPTER = TypeAdapter(RoundLeadership)
