"""Which API server, and as whom: a kubeconfig, or the service account of the Pod that this runs in."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ringweave.errors import LaunchError, UsageError, explain
from ringweave.files import json_text

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PLUGIN_S = 60


def connection(
    environ: Mapping[str, str], *, context: str | None = None, home: Path | None = None
) -> kopf.ConnectionInfo:
    """How to reach the API server.

    Args:
        environ: KUBECONFIG, KUBERNETES_SERVICE_HOST and _PORT count, as for kubectl.
        context: Which context of the kubeconfig; None: its current one.
        home: The user's home folder, for ~/.kube/config.

    Raises:
        UsageError: The kubeconfig cannot be read or is wrong.
        LaunchError: There is neither, or the plugin that it names gives no credentials.
    """
    paths = [Path(part) for part in environ.get("KUBECONFIG", "").split(":") if part]
    usual = (home or Path.home()) / ".kube" / "config"
    if not paths and usual.exists():
        paths = [usual]
    if paths:
        return _from_files(paths, context, environ)
    if environ.get("KUBERNETES_SERVICE_HOST") and (ACCOUNT / "token").exists():
        return _from_account(environ)
    do = "Set KUBECONFIG to a kubeconfig, or run it in a Pod with a service account"
    raise LaunchError(explain("Kubernetes", got="no kubeconfig", expected="one, or a service account", do=do))


def _from_account(environ: Mapping[str, str]) -> kopf.ConnectionInfo:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    namespace = ACCOUNT / "namespace"
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=str(ACCOUNT / "ca.crt"),
        token=(ACCOUNT / "token").read_text().strip(),
        default_namespace=namespace.read_text().strip() if namespace.exists() else None,
    )


def _from_files(paths: list[Path], context: str | None, environ: Mapping[str, str]) -> kopf.ConnectionInfo:
    """The files taken together, the first value of each name wins, as for kubectl."""
    contexts: dict[str, Any] = {}
    clusters: dict[str, tuple[Path, Any]] = {}
    users: dict[str, tuple[Path, Any]] = {}
    for path in paths:
        config = _read(path)
        context = context or config.get("current-context")
        for item in config.get("contexts") or ():
            contexts.setdefault(item["name"], item.get("context") or {})
        for item in config.get("clusters") or ():
            clusters.setdefault(item["name"], (path.parent, item.get("cluster") or {}))
        for item in config.get("users") or ():
            users.setdefault(item["name"], (path.parent, item.get("user") or {}))
    where = ":".join(map(str, paths))
    chosen = _named(contexts, context, "context", where)
    cluster = _named(clusters, chosen.get("cluster"), "cluster", where)
    user = _named(users, chosen.get("user"), "user", where) if chosen.get("user") else (Path(), {})
    return _made(cluster, user, chosen.get("namespace"), environ)


def _made(
    cluster: tuple[Path, Any], user: tuple[Path, Any], namespace: str | None, environ: Mapping[str, str]
) -> kopf.ConnectionInfo:
    (base, place), (home, who) = cluster, user
    given = _from_plugin(who["exec"], home, environ) if "exec" in who else {}
    token = given.get("token") or who.get("token")
    if not token and who.get("tokenFile"):
        token = (home / who["tokenFile"]).read_text().strip()
    return kopf.ConnectionInfo(
        server=place["server"],
        ca_path=_file(base, place, "certificate-authority"),
        ca_data=place.get("certificate-authority-data"),
        insecure=place.get("insecure-skip-tls-verify"),
        certificate_path=_file(home, who, "client-certificate"),
        certificate_data=given.get("clientCertificateData") or who.get("client-certificate-data"),
        private_key_path=_file(home, who, "client-key"),
        private_key_data=given.get("clientKeyData") or who.get("client-key-data"),
        username=who.get("username"),
        password=who.get("password"),
        token=token,
        default_namespace=namespace,
        proxy_url=place.get("proxy-url"),
    )


def _file(base: Path, section: Mapping[str, Any], key: str) -> str | None:
    """Its path; data beside it beats it, as for kubectl."""
    path = section.get(key)
    return str(base / path) if path and f"{key}-data" not in section else None


def _from_plugin(plugin: Mapping[str, Any], home: Path, environ: Mapping[str, str]) -> Mapping[str, str]:
    """What a program says that a kubeconfig names for credentials, as those of cloud providers do."""
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
            timeout=_PLUGIN_S,
        )
        return dict(json_text.loads(done.stdout)["status"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        do = plugin.get("installHint") or "See whether it runs by itself"
        text = explain(f"credentials by {command}", got=str(error), expected="an ExecCredential", do=str(do))
        raise LaunchError(text) from error


def _read(path: Path) -> Any:
    do = "Point KUBECONFIG to a kubeconfig that you may read"
    try:
        return YAML(typ="safe", pure=True).load(path) or {}
    except (OSError, YAMLError, ValueError, RecursionError) as error:
        got = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = explain("kubeconfig", got=got, expected="a YAML file that can be read", do=do, where=str(path))
        raise UsageError(text) from error


def _named(found: Mapping[str, Any], name: str | None, what: str, where: str) -> Any:
    if name is None or name not in found:
        expected = f"one of {', '.join(found) or 'none'}"
        do = "Correct the kubeconfig (kubectl config view shows it)"
        raise UsageError(explain(f"{what} of the kubeconfig", got=name, expected=expected, do=do, where=where))
    return found[name]
