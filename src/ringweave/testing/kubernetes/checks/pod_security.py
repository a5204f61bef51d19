"""The Pod Security Standard `restricted`, where a namespace enforces it: as far as Pods without volumes of hosts go."""

from collections.abc import Iterator, Mapping
from typing import Any

from ringweave.testing.kubernetes.server.refusing import Refused

LABEL = "pod-security.kubernetes.io/enforce"


def check(namespace: Mapping[str, Any], pod: Mapping[str, Any]) -> None:
    """Refuse a Pod that its namespace does not allow.

    Raises:
        Refused: It breaks the standard.
    """
    if (namespace["metadata"].get("labels") or {}).get(LABEL) != "restricted":
        return
    found = [problem for each in pod["spec"]["containers"] for problem in _problems(pod["spec"], each)]
    if found:
        name = pod["metadata"]["name"]
        text = f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {", ".join(found)}'
        raise Refused(403, "Forbidden", text, name=name, kind="pods")


def _problems(spec: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext") or {}
    whole = {**(spec.get("securityContext") or {}), **own}
    of, of_pod = f'(container "{container["name"]}" must set', f'(pod or container "{container["name"]}" must set'
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"allowPrivilegeEscalation != false {of} securityContext.allowPrivilegeEscalation=false)"
    if "ALL" not in (own.get("capabilities") or {}).get("drop", ()):
        yield f'unrestricted capabilities {of} securityContext.capabilities.drop=["ALL"])'
    if whole.get("runAsNonRoot") is not True:
        yield f"runAsNonRoot != true {of_pod} securityContext.runAsNonRoot=true)"
    if (whole.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f'seccompProfile {of_pod} securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost")'
