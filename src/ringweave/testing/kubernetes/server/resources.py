"""Which resources the fake API server has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """One resource of one version of one group."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True
    short_names: tuple[str, ...] = ()
    has_status: bool = False
    verbs: tuple[str, ...] = ALL_VERBS
    schema: Mapping[str, Any] | None = None
    """Of a custom resource; None for what is built in, of which little is checked."""
    columns: tuple[Mapping[str, Any], ...] = ()
    categories: tuple[str, ...] = ()
    subresources: Mapping[str, str] = field(default_factory=dict)
    """Name -> kind, for discovery."""

    @property
    def api_version(self) -> str:
        """`v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        """Group and plural."""
        return self.group, self.plural

    @property
    def is_custom(self) -> bool:
        """It was defined by a CustomResourceDefinition."""
        return self.schema is not None


def _core(plural: str, kind: str, *short: str, **more: Any) -> Resource:
    return Resource(group="", version="v1", plural=plural, kind=kind, short_names=short, **more)


def _review(group: str, plural: str, kind: str, *, namespaced: bool = False) -> Resource:
    return Resource(group=group, version="v1", plural=plural, kind=kind, is_namespaced=namespaced, verbs=("create",))


_RBAC = "rbac.authorization.k8s.io"
_ADMISSION = "admissionregistration.k8s.io"


def _cluster(group: str, plural: str, kind: str, *short: str) -> Resource:
    return Resource(group=group, version="v1", plural=plural, kind=kind, is_namespaced=False, short_names=short)


BUILT_IN = (
    _core("namespaces", "Namespace", "ns", is_namespaced=False, has_status=True),
    _core("pods", "Pod", "po", has_status=True, subresources={"log": "Pod", "binding": "Binding"}),
    _core("configmaps", "ConfigMap", "cm"),
    _core("secrets", "Secret"),
    _core("services", "Service", "svc", has_status=True),
    _core("serviceaccounts", "ServiceAccount", "sa"),
    _core("events", "Event", "ev"),
    _core("nodes", "Node", "no", is_namespaced=False, has_status=True),
    Resource(group="apps", version="v1", plural="deployments", kind="Deployment", short_names=("deploy",)),
    Resource(group="coordination.k8s.io", version="v1", plural="leases", kind="Lease"),
    Resource(group=_RBAC, version="v1", plural="roles", kind="Role"),
    Resource(group=_RBAC, version="v1", plural="rolebindings", kind="RoleBinding"),
    _cluster(_RBAC, "clusterroles", "ClusterRole"),
    _cluster(_RBAC, "clusterrolebindings", "ClusterRoleBinding"),
    _cluster(_ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy"),
    _cluster(_ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding"),
    _cluster("apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", "crd", "crds"),
    _review("authorization.k8s.io", "subjectaccessreviews", "SubjectAccessReview"),
    _review("authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview"),
    _review("authentication.k8s.io", "selfsubjectreviews", "SelfSubjectReview"),
)


def custom(definition: Mapping[str, Any]) -> list[Resource]:
    """The resources that a CustomResourceDefinition defines, one for each version."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Resource(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            is_namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames", ())),
            has_status="status" in version.get("subresources", {}),
            schema=version["schema"]["openAPIV3Schema"],
            columns=tuple(version.get("additionalPrinterColumns", ())),
            categories=tuple(names.get("categories", ())),
        )
        for version in spec["versions"]
        if version["served"]
    ]
