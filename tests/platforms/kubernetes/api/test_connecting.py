"""Kubeconfigs as kubectl reads them."""

import base64
import json
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ringweave.errors import LaunchError, UsageError
from ringweave.platforms.kubernetes import agent_gateway, api_client
from ringweave.platforms.kubernetes.api_client import connection_info

DATA = "DATA"
CONFIG = """
current-context: one
contexts:
  - {name: one, context: {cluster: c, user: token, namespace: team}}
  - {name: two, context: {cluster: c, user: plugin}}
  - {name: three, context: {cluster: c, user: files}}
clusters:
  - {name: c, cluster: {server: "https://api.example:6443", certificate-authority: ca.crt}}
users:
  - {name: token, user: {token: secret}}
  - {name: plugin, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: COMMAND, args: [ARGUMENT]}}}
  - {name: files, user: {client-certificate: me.crt, client-key: me.key, tokenFile: token}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config"
    answer = {"kind": "ExecCredential", "status": {"token": "from-the-plugin"}}
    script = tmp_path / "plugin.py"
    script.write_text(f"print({json.dumps(answer)!r})")
    path.write_text(CONFIG.replace("COMMAND", sys.executable).replace("ARGUMENT", str(script)))
    for name, text in (("token", "from-a-file\n"), ("ca.crt", "an authority"), ("me.crt", "me"), ("me.key", "key")):
        (tmp_path / name).write_text(text)
    return path


def test_the_current_context_counts(config: Path) -> None:
    found = connection_info({"KUBECONFIG": str(config)})
    assert (found.server, found.token, found.default_namespace) == ("https://api.example:6443", "secret", "team")
    assert found.authority == "an authority"
    assert found.headers() == {"Authorization": "Bearer secret"}


def test_another_context_can_be_named(config: Path) -> None:
    found = connection_info({"KUBECONFIG": str(config)}, context="three")
    assert found.certificate == "key\nme"
    assert found.token == "from-a-file"


def test_a_plugin_gives_credentials(config: Path) -> None:
    assert connection_info({"KUBECONFIG": str(config)}, context="two").token == "from-the-plugin"


def test_files_are_taken_together_and_the_first_wins(config: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.write_text("users: [{name: token, user: {token: mine}}]")
    assert connection_info({"KUBECONFIG": f"{first}:{config}"}).token == "mine"


def test_the_usual_place_is_in_the_home_folder(config: Path, tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    for path in (config, tmp_path / "ca.crt"):
        path.rename(tmp_path / ".kube" / path.name)
    assert connection_info({}, home=tmp_path).token == "secret"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("contexts: [", "kubeconfig: .* expected a YAML file that can be read"),
        ("[" * 5_000, "kubeconfig: .* expected a YAML file that can be read"),
        ("current-context: one", "context of the kubeconfig: 'one', expected one of none"),
        (CONFIG.replace("cluster: c, user: token", "cluster: d, user: token"), "cluster of the kubeconfig: 'd', .* c"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "wrong"
    path.write_text(text)
    with pytest.raises(UsageError, match=error):
        connection_info({"KUBECONFIG": str(path)})


def test_a_plugin_that_fails_is_named(config: Path) -> None:
    config.write_text(config.read_text().replace(sys.executable, "/nowhere/plugin"))
    with pytest.raises(LaunchError, match=r"credentials by /nowhere/plugin: .*, expected an ExecCredential"):
        connection_info({"KUBECONFIG": str(config)}, context="two")


@pytest.mark.parametrize("said", ["{", "null", "[]", "{}", "[" * 10_000, '{"status": 3}'])
def test_a_plugin_that_says_something_else_is_named(config: Path, tmp_path: Path, said: str) -> None:
    (tmp_path / "plugin.py").write_text(f"print({said!r})")
    with pytest.raises(LaunchError, match=r"credentials by .*, expected an ExecCredential"):
        connection_info({"KUBECONFIG": str(config)}, context="two")


def test_without_any_the_mend_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"Kubernetes: 'no kubeconfig', expected one, or a service account. Set KUBECONFIG"
    ):
        connection_info({}, home=tmp_path)


def test_a_file_that_cannot_be_read_is_named(config: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(
        UsageError, match=r"file of the kubeconfig: 'No such file .*', expected text that .* \[.*/ca.crt\]"
    ):
        connection_info({"KUBECONFIG": str(config)})


@pytest.mark.parametrize(
    ("key", "text", "error"),
    [
        (
            "certificate-authority: ca.crt",
            "certificate-authority-data: '5'",
            "certificate-authority-data of the kube.*",
        ),
        ("certificate-authority: ca.crt", "certificate-authority: ca.crt", "certificates of the kubeconfig: .*"),
        ("certificate-authority: ca.crt", "proxy-url: p", "certificates of the kubeconfig: .*"),
    ],
)
def test_what_is_no_certificate_is_named(config: Path, key: str, text: str, error: str) -> None:
    config.write_text(config.read_text().replace(key, text))
    with pytest.raises(UsageError, match=f"{error}, expected text that can be read. Correct the kubeconfig"):
        connection_info({"KUBECONFIG": str(config)}, context="three").ssl_context()


def test_data_goes_before_files_and_certificates_are_loaded(config: Path) -> None:
    issued = agent_gateway.issue_certificate(["api.example"], datetime.now(UTC))
    text = config.read_text().replace("certificate-authority: ca.crt", f"certificate-authority-data: {DATA}")
    text = text.replace("client-key: me.key", f"client-key: none, client-key-data: {DATA}")
    text = text.replace("client-certificate: me.crt", f"client-certificate-data: {DATA}")
    config.write_text(text.replace(DATA, base64.b64encode((issued.key + issued.certificate).encode()).decode()))
    context = connection_info({"KUBECONFIG": str(config)}, context="three").ssl_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert [dict(each[0] for each in found["subject"]) for found in context.get_ca_certs()] == [
        {"commonName": "ringweave"}
    ]


def test_name_password_and_any_certificate(config: Path) -> None:
    text = config.read_text().replace("{token: secret}", "{username: ann, password: b}")
    config.write_text(
        text.replace("certificate-authority: ca.crt", "insecure-skip-tls-verify: true, proxy-url: 'http://p'")
    )
    found = connection_info({"KUBECONFIG": str(config)})
    assert found.headers() == {"Authorization": "Basic YW5uOmI="}
    assert found.proxy_url == "http://p"
    assert found.ssl_context().verify_mode is ssl.CERT_NONE


def test_a_pod_takes_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "SERVICE_ACCOUNT_DIR", tmp_path)
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text(name)
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = connection_info(environ, home=tmp_path)
    assert (found.server, found.authority) == ("https://[fd00::1]:443", "ca.crt")
    assert (found.token, found.default_namespace) == ("token", "namespace")
