"""Kubernetes API client: errors, connection settings, resource kinds, JSON requests, watches, and access reviews."""

import asyncio
import base64
import contextlib
import io
import json
import logging
import socket
import ssl
import subprocess
import tempfile
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

import ringweave
from ringweave.errors import LaunchError, UsageError, explain
from ringweave.files import file_io
from ringweave.jobs.admission import Permission
from ringweave.platforms.kubernetes import objects
from ringweave.platforms.kubernetes.objects import Object


class ApiError(LaunchError):
    """Failure answer of the API server."""

    def __init__(self, text: str, *, status: int, reason: str, message: str) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status code."""
        self.reason = reason
        """One word: `NotFound`, `AlreadyExists`, `Conflict`, `Invalid`, `Forbidden`, `Expired`."""
        self.message = message
        """Message of the server."""

    @property
    def is_not_found(self) -> bool:
        """Return whether the object does not exist."""
        return self.status == 404

    @property
    def already_exists(self) -> bool:
        return self.reason == "AlreadyExists"

    @property
    def is_stale(self) -> bool:
        """Return whether the object was changed or replaced meanwhile; read it again."""
        is_another = self.status == 422 and "metadata.uid" in self.message  # the answer to a patch with a uid
        return is_another or (self.status == 409 and not self.already_exists)

    @property
    def is_no_log(self) -> bool:
        """Return whether the API server has no log, since nothing ran, or nothing is left of it."""
        return self.is_not_found or (self.status == 400 and "waiting to start" in self.message)

    @property
    def is_refusal(self) -> bool:
        """Return whether the request itself is wrong or not allowed, so that a retry does not help."""
        return self.status in (400, 403, 405, 413, 415, 422) and not self.is_stale


def error_from_answer(what: str, status: int, answer: Mapping[str, Any]) -> ApiError:
    """Return the error of an answer: a Status object, or the body that a proxy made."""
    reason = str(answer.get("reason") or "Unknown")
    message = str(answer.get("message") or "no message")
    do = _FIXES.get(reason, "Check the API server and its log")
    text = explain(what, got=f"{status} {reason}", expected="an answer of the API server", do=f"{message}. {do}")
    return ApiError(text, status=status, reason=reason, message=message)


def unreachable_error(server: str, error: Exception) -> LaunchError:
    """Return the error for a server that does not answer."""
    got = str(error) or type(error).__name__
    do = "Check the kubeconfig (kubectl cluster-info shows whether kubectl gets there), and the network"
    return LaunchError("Kubernetes API server", got=got, expected="an answer", do=do, where=server)


_FIXES = {
    "Forbidden": "Ask for a role that allows it (kubectl auth can-i --list shows your permissions)",
    "Unauthorized": "Log in again: the credentials of the kubeconfig are not accepted",
    "NotFound": "Check the name and the namespace; if the resource itself is unknown, apply deploy/base first",
    "Conflict": "It was changed at the same time; try again",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceKind:
    """Resource kind of the Kubernetes API."""

    api_version: str
    kind: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of an object, or of the list of objects; without a namespace, of all namespaces."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        space = f"/namespaces/{namespace}" if namespace and self.is_namespaced else ""
        return root + space + "/" + "/".join(part for part in (self.plural, name, subresource) if part)


TRAINING_JOBS = ResourceKind(api_version=objects.API_VERSION, kind=objects.CRD_KIND, plural=objects.CRD_PLURAL)
PODS = ResourceKind(api_version="v1", kind="Pod", plural="pods")
CONFIG_MAPS = ResourceKind(api_version="v1", kind="ConfigMap", plural="configmaps")
SECRETS = ResourceKind(api_version="v1", kind="Secret", plural="secrets")
SERVICES = ResourceKind(api_version="v1", kind="Service", plural="services")
EVENTS = ResourceKind(api_version="v1", kind="Event", plural="events")
NAMESPACES = ResourceKind(api_version="v1", kind="Namespace", plural="namespaces", is_namespaced=False)
LEASES = ResourceKind(api_version="coordination.k8s.io/v1", kind="Lease", plural="leases")
DEFINITIONS = ResourceKind(
    api_version="apiextensions.k8s.io/v1",
    kind="CustomResourceDefinition",
    plural="customresourcedefinitions",
    is_namespaced=False,
)
ACCESS_REVIEWS = ResourceKind(
    api_version="authorization.k8s.io/v1",
    kind="SubjectAccessReview",
    plural="subjectaccessreviews",
    is_namespaced=False,
)
SELF_ACCESS_REVIEWS = ResourceKind(
    api_version="authorization.k8s.io/v1",
    kind="SelfSubjectAccessReview",
    plural="selfsubjectaccessreviews",
    is_namespaced=False,
)
SELF_REVIEWS = ResourceKind(
    api_version="authentication.k8s.io/v1",
    kind="SelfSubjectReview",
    plural="selfsubjectreviews",
    is_namespaced=False,
)


MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
"""Merges conditions by type; supported for built-in resources only."""
_TIMEOUT_S = 60.0
_MAX_REQUESTS = 64
"""Maximum number of requests at a time, beside watches and logs."""
_CLOSE_TIMEOUT_S, _CLOSE_POLL_S = 2.0, 0.005
_MAX_SMALL_BODY_BYTES = 2**16
_PAGE_SIZE = 500
"""Maximum number of objects in one answer to a list request."""
_WATCH_TIMEOUT_S = 270
WATCH_SILENCE_S = 90.0
"""Time after which a silent watch is dead; the API server sends a bookmark about every minute."""
_MIN_WATCH_BACKOFF_S, _MAX_WATCH_BACKOFF_S = 0.1, 5.0
_CHANGES = ("ADDED", "MODIFIED", "DELETED")


VersionedList = tuple[list[Object], str]
"""Objects, and the resourceVersion of the list."""


class KubernetesClient:
    """Client of one API server with a connection pool; a context manager for use inside one event loop."""

    def __init__(self, connect: Callable[[], "ConnectionInfo"]) -> None:
        """Connect with the first request.

        Args:
            connect: Returns address and credentials; called again when the credentials are rejected, as those of a
                service account change every hour.
        """
        self._connect = connect
        self._connection = connection = connect()
        self._server = connection.server.rstrip("/")
        self._headers = connection.headers()
        self._open_session: aiohttp.ClientSession | None = None
        self._requests = asyncio.Semaphore(_MAX_REQUESTS)
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    @property
    def namespace(self) -> str:
        """Return the user's default namespace."""
        return self._connection.default_namespace or "default"

    @property
    def server(self) -> str:
        return self._server

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._open_session is not None
        return self._open_session

    async def __aenter__(self) -> "KubernetesClient":
        context = self._connection.ssl_context() if self._server.startswith("https:") else False
        self._open_session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context, socket_factory=self._open_socket),
            proxy=self._connection.proxy_url,
            headers={"User-Agent": f"ringweave/{ringweave.__version__}"},  # the API server's field manager, too
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            read_bufsize=2**18,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all sockets.

        A connection closed in the middle of an answer, such as a watch, first shuts down TLS with the server. The
        session does not wait for that, and an event loop that ends meanwhile would leave the socket open.
        """
        await self._session.close()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _CLOSE_TIMEOUT_S
        while any(each.fileno() >= 0 for each in self._sockets) and loop.time() < deadline_s:
            await asyncio.sleep(_CLOSE_POLL_S)

    def _open_socket(self, address: tuple[Any, ...]) -> socket.socket:
        opened = socket.socket(*address[:3])
        self._sockets.add(opened)
        return opened

    async def get(self, kind: ResourceKind, namespace: str | None, name: str) -> Object:
        """Return one object.

        Raises:
            ApiError: It does not exist, or may not be read.
        """
        return await self.request("GET", kind.path(namespace, name))

    async def find(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """Return one object; None if it does not exist.

        Raises:
            ApiError: It may not be read.
        """
        try:
            return await self.get(kind, namespace, name)
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    async def list(self, kind: ResourceKind, namespace: str | None, **params: str) -> Sequence[Object]:
        """Return all objects that the parameters select."""
        return (await self._list_pages(kind.path(namespace), params))[0]

    async def _list_pages(self, path: str, params: Mapping[str, str]) -> "VersionedList":
        found: list[Object] = []
        page = {**params, "limit": str(_PAGE_SIZE)}
        while True:
            answer = await self.request("GET", path, params=page)
            found += answer["items"] or ()
            if not answer["metadata"].get("continue"):
                return found, answer["metadata"]["resourceVersion"]
            page["continue"] = answer["metadata"]["continue"]

    async def watch(self, kind: ResourceKind, namespace: str | None, **params: str) -> AsyncIterator[Object]:
        """Yield all objects that the parameters select, then each one that is added, changed or deleted; for ever.

        A lost connection is opened again where it ended. All objects are yielded again if the API server does not know
        that version any more, or if nothing came from it; a deletion meanwhile is not seen.
        """
        path, version, backoff_s = kind.path(namespace), "", _MIN_WATCH_BACKOFF_S
        query = {**params, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_TIMEOUT_S)}
        while True:
            try:
                if not version:
                    found, version = await self._list_pages(path, params)
                    for each in found:
                        yield each
                query["resourceVersion"], version = version, ""
                async with contextlib.aclosing(self.stream_lines(path, query, silence_s=WATCH_SILENCE_S)) as lines:
                    async for line in lines:
                        event = _parse_answer(line.encode())
                        if event.get("type") not in (*_CHANGES, "BOOKMARK"):  # an error: this version has expired
                            version = ""
                            break
                        version, backoff_s = event["object"]["metadata"]["resourceVersion"], _MIN_WATCH_BACKOFF_S
                        if event["type"] in _CHANGES:
                            yield event["object"]
            except LaunchError as error:
                backoff_s = min(2 * backoff_s, _MAX_WATCH_BACKOFF_S)
                logging.getLogger(__name__).warning("watch of %s: %s", kind.plural, error)
            await asyncio.sleep(backoff_s)

    async def create(self, kind: ResourceKind, namespace: str | None, body: Object, **params: str) -> Object:
        """Create an object.

        Raises:
            ApiError: The object exists (`already_exists`), or is refused.
        """
        whole = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        return await self.request("POST", kind.path(namespace), params=params, body=whole)

    async def replace(
        self, kind: ResourceKind, namespace: str | None, body: Object, *, subresource: str | None = None
    ) -> Object:
        """Replace the object with this resourceVersion.

        Raises:
            ApiError: The object was changed meanwhile (`is_stale`).
        """
        path = kind.path(namespace, body["metadata"]["name"], subresource)
        return await self.request("PUT", path, body={"apiVersion": kind.api_version, "kind": kind.kind, **body})

    async def patch(
        self, kind: ResourceKind, namespace: str | None, name: str, body: Object, *, subresource: str | None = None
    ) -> Object:
        """Merge the fields into the object. Lists are replaced whole, conditions of a subresource merge by type."""
        path = kind.path(namespace, name, subresource)
        is_built_in = kind.api_version == "v1"
        return await self.request(
            "PATCH", path, body=body, content_type=STRATEGIC_MERGE_PATCH if is_built_in else MERGE_PATCH
        )

    async def delete(self, kind: ResourceKind, namespace: str | None, name: str, **options: Any) -> None:
        """Delete the object. It may be gone already, or be another one than the preconditions name."""
        try:
            await self.request("DELETE", kind.path(namespace, name), body=options or None)
        except ApiError as error:
            if not error.is_not_found and not (error.is_stale and "preconditions" in options):
                raise

    async def delete_exactly(self, kind: ResourceKind, found: Mapping[str, Any]) -> None:
        """Delete this object, and no later one of the same name."""
        metadata = found["metadata"]
        await self.delete(kind, metadata["namespace"], metadata["name"], preconditions={"uid": metadata["uid"]})

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send a request and return the answer.

        Raises:
            ApiError: The request was refused.
            LaunchError: The server did not answer.
        """
        data = None if body is None else json.dumps(body, separators=(",", ":"))
        headers = {"Accept": "application/json", **({"Content-Type": content_type} if data else {})}
        status, answer = await self._send_request(method, path, params, data, headers)
        if status == 401:
            self._headers = self._connect().headers()
            status, answer = await self._send_request(method, path, params, data, headers)
        if status >= 400:
            raise error_from_answer(f"{method} {path}", status, answer)
        return answer

    async def _send_request(
        self, method: str, path: str, params: Mapping[str, str] | None, data: str | None, headers: Mapping[str, str]
    ) -> tuple[int, Object]:
        whole = {**self._headers, **headers}
        content = None if data is None else _request_content(data.encode())
        try:
            async with (
                self._requests,
                self._session.request(
                    method, self._server + path, params=params, data=content, headers=whole
                ) as response,
            ):
                return response.status, _parse_answer(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable_error(self._server, error) from error

    async def stream_lines(
        self, path: str, params: Mapping[str, str], *, silence_s: float | None = None
    ) -> AsyncGenerator[str]:
        """Yield the answer line by line: of a watch, or of a followed log.

        `silence_s`: time without a byte after which the connection counts as broken; None: never.

        Raises:
            ApiError: The request was refused.
            LaunchError: The server did not answer, or the connection broke.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=silence_s)
        try:
            async with self._session.get(
                self._server + path, params=params, timeout=timeout, headers=self._headers
            ) as response:
                if response.status >= 400:
                    raise error_from_answer(f"GET {path}", response.status, _parse_answer(await response.read()))
                rest = b""
                async for chunk in response.content.iter_any():
                    *whole, rest = (file_io.bounded(rest) + chunk).split(b"\n")
                    for line in whole:
                        yield line.decode("utf-8", "replace")
                if rest:
                    yield rest.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise unreachable_error(self._server, error) from error


def _request_content(data: bytes) -> bytes | io.BytesIO:
    """Return a small body as bytes, sent with the headers at half the cost, and a large one as a stream."""
    return data if len(data) <= _MAX_SMALL_BODY_BYTES else io.BytesIO(data)


def _parse_answer(content: bytes) -> Object:
    try:
        answer = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return {"reason": "NotJson", "message": content[:200].decode("utf-8", "replace")}
    return answer if isinstance(answer, dict) else {"message": str(answer)[:200]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionInfo:
    """Address of an API server, and credentials for it."""

    server: str
    default_namespace: str | None = None
    proxy_url: str | None = None
    authority: str | None = None
    """Trusted certificates as PEM; None: those of the system."""
    is_insecure: bool = False
    """Trust any certificate."""
    certificate: str | None = None
    """Private key and client certificate as PEM."""
    username: str | None = None
    password: str | None = None
    token: str | None = None

    def headers(self) -> dict[str, str]:
        if self.username and self.password:
            basic = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
            return {"Authorization": f"Basic {basic}"}
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context of connections.

        Raises:
            UsageError: A certificate or the key is none.
        """
        try:
            context = ssl.create_default_context(cadata=self.authority)
            if self.certificate is not None:
                with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads files only
                    file.write(self.certificate)
                    file.flush()
                    context.load_cert_chain(file.name)
        except (ssl.SSLError, ValueError) as error:
            raise _bad_file_error("certificates of the kubeconfig", error, self.server) from error
        if self.is_insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PLUGIN_TIMEOUT_S = 60


def connection_info(
    environ: Mapping[str, str], *, context: str | None = None, home: Path | None = None
) -> ConnectionInfo:
    """Return address and credentials of the API server.

    Args:
        environ: KUBECONFIG, KUBERNETES_SERVICE_HOST and _PORT count, as for kubectl.
        context: Context of the kubeconfig; None: the current one.
        home: The user's home folder, for ~/.kube/config.

    Raises:
        UsageError: The kubeconfig cannot be read or is invalid.
        LaunchError: There is no kubeconfig or service account, or the exec plugin returns no credentials.
    """
    paths = [Path(part) for part in environ.get("KUBECONFIG", "").split(":") if part]
    usual = (home or Path.home()) / ".kube" / "config"
    if not paths and usual.exists():
        paths = [usual]
    if paths:
        return _from_kubeconfigs(paths, context, environ)
    if environ.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT_DIR / "token").exists():
        return _from_service_account(environ)
    do = "Set KUBECONFIG to a kubeconfig, or run it in a Pod with a service account"
    raise LaunchError("Kubernetes", got="no kubeconfig", expected="one, or a service account", do=do)


def _from_service_account(environ: Mapping[str, str]) -> ConnectionInfo:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    namespace = SERVICE_ACCOUNT_DIR / "namespace"
    return ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        authority=(SERVICE_ACCOUNT_DIR / "ca.crt").read_text(),
        token=(SERVICE_ACCOUNT_DIR / "token").read_text().strip(),
        default_namespace=namespace.read_text().strip() if namespace.exists() else None,
    )


def _from_kubeconfigs(paths: list[Path], context: str | None, environ: Mapping[str, str]) -> ConnectionInfo:
    """Merge the kubeconfigs as kubectl does: the first value of each name wins."""
    contexts: dict[str, Any] = {}
    clusters: dict[str, tuple[Path, Any]] = {}
    users: dict[str, tuple[Path, Any]] = {}
    for path in paths:
        config = _read_kubeconfig(path)
        context = context or config.get("current-context")
        for item in config.get("contexts") or ():
            contexts.setdefault(item["name"], item.get("context") or {})
        for item in config.get("clusters") or ():
            clusters.setdefault(item["name"], (path.parent, item.get("cluster") or {}))
        for item in config.get("users") or ():
            users.setdefault(item["name"], (path.parent, item.get("user") or {}))
    where = ":".join(map(str, paths))
    chosen = _find_section(contexts, context, "context", where)
    cluster = _find_section(clusters, chosen.get("cluster"), "cluster", where)
    user = _find_section(users, chosen.get("user"), "user", where) if chosen.get("user") else (Path(), {})
    return _make_connection_info(cluster, user, chosen.get("namespace"), environ)


def _make_connection_info(
    cluster: tuple[Path, Any], user: tuple[Path, Any], namespace: str | None, environ: Mapping[str, str]
) -> ConnectionInfo:
    (base, cluster_fields), (home, user_fields) = cluster, user
    plugin_fields = _from_plugin(user_fields["exec"], home, environ) if "exec" in user_fields else {}
    token = plugin_fields.get("token") or user_fields.get("token")
    if not token and user_fields.get("tokenFile"):
        token = _read_file(home / user_fields["tokenFile"]).strip()
    key = plugin_fields.get("clientKeyData") or _read_pem(home, user_fields, "client-key")
    certificate = plugin_fields.get("clientCertificateData") or _read_pem(home, user_fields, "client-certificate")
    return ConnectionInfo(
        server=cluster_fields["server"],
        default_namespace=namespace,
        proxy_url=cluster_fields.get("proxy-url"),
        authority=_read_pem(base, cluster_fields, "certificate-authority"),
        is_insecure=bool(cluster_fields.get("insecure-skip-tls-verify")),
        certificate=f"{key}\n{certificate}" if key and certificate else None,
        username=user_fields.get("username"),
        password=user_fields.get("password"),
        token=token,
    )


def _read_pem(base: Path, section: Mapping[str, Any], key: str) -> str | None:
    """Return the data in the section, else the content of the file that it names; as kubectl does."""
    if data := section.get(f"{key}-data"):
        try:
            return base64.b64decode(data).decode()
        except ValueError as error:
            raise _bad_file_error(f"{key}-data of the kubeconfig", error, str(base)) from error
    return _read_file(base / section[key]) if section.get(key) else None


def _read_file(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise _bad_file_error("file of the kubeconfig", error, str(path)) from error


def _bad_file_error(what: str, error: Exception, where: str) -> UsageError:
    got = (error.strerror if isinstance(error, OSError) else None) or str(error)
    do = "Correct the kubeconfig, or let your user read the file"
    return UsageError(what, got=got, expected="text that can be read", do=do, where=where)


def _from_plugin(plugin: Mapping[str, Any], home: Path, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the credentials of the kubeconfig's exec plugin, as cloud providers use."""
    version = plugin.get("apiVersion", "client.authentication.k8s.io/v1")
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    own = {item["name"]: item["value"] for item in plugin.get("env") or ()}
    command = plugin["command"] if "/" not in plugin["command"] else str(home / plugin["command"])
    try:
        done = subprocess.run(
            [command, *(plugin.get("args") or ())],
            env={**environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            capture_output=True,
            text=True,
            check=True,
            timeout=_PLUGIN_TIMEOUT_S,
        )
        return dict(file_io.parse_json(done.stdout)["status"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        do = plugin.get("installHint") or "Check that the command runs by itself"
        text = explain(f"credentials by {command}", got=str(error), expected="an ExecCredential", do=str(do))
        raise LaunchError(text) from error


def _read_kubeconfig(path: Path) -> Any:
    do = "Point KUBECONFIG to a kubeconfig that you may read"
    try:
        return YAML(typ="safe", pure=True).load(path) or {}
    except (OSError, YAMLError, ValueError, RecursionError) as error:
        got = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = explain("kubeconfig", got=got, expected="a YAML file that can be read", do=do, where=str(path))
        raise UsageError(text) from error


def _find_section(sections: Mapping[str, Any], name: str | None, section: str, where: str) -> Any:
    if name is None or name not in sections:
        expected = f"one of {', '.join(sections) or 'none'}"
        do = "Correct the kubeconfig (kubectl config view shows it)"
        raise UsageError(f"{section} of the kubeconfig", got=name, expected=expected, do=do, where=where)
    return sections[name]


SUBMIT_VERB = "submit"


async def fetch_permission(
    client: KubernetesClient, namespace: str, verb: str, *, user: str | None = None, groups: Sequence[str] = ()
) -> Permission:
    """Ask the API server for a permission.

    `user`: the user; None: the client's own.

    Raises:
        ApiError: The client may not ask.
        LaunchError: The server did not answer.
    """
    attributes = {"namespace": namespace, "verb": verb, "group": objects.API_GROUP, "resource": objects.CRD_PLURAL}
    kind = SELF_ACCESS_REVIEWS if user is None else ACCESS_REVIEWS
    subject = {} if user is None else {"user": user, "groups": list(groups)}
    status = (await client.create(kind, None, {"spec": {**subject, "resourceAttributes": attributes}})).get(
        "status", {}
    )
    if status.get("allowed"):
        return Permission(allowed=True, text=status.get("reason", "") or "the roles of the cluster", any_owner=True)
    reason = status.get("reason") or status.get("evaluationError") or "no role allows it"
    return Permission(
        allowed=False, text=f"no role allows {verb} on {objects.CRD_PLURAL}.{objects.API_GROUP} ({reason})"
    )
