"""Resources of the fake API server, built in and custom."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiResource:
    """Resource of one version of one API group."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True
    short_names: tuple[str, ...] = ()
    has_status: bool = False
    verbs: tuple[str, ...] = ALL_VERBS
    schema: Mapping[str, Any] | None = None
    """Schema of a custom resource; None for built-in resources, of which little is checked."""
    columns: tuple[Mapping[str, Any], ...] = ()
    categories: tuple[str, ...] = ()
    subresources: Mapping[str, str] = field(default_factory=dict)
    """Name -> kind, for discovery."""

    @property
    def api_version(self) -> str:
        """API version: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        """Group and plural."""
        return self.group, self.plural

    @property
    def is_custom(self) -> bool:
        """Return whether a CustomResourceDefinition defines the resource."""
        return self.schema is not None


def _core_resource(plural: str, kind: str, *short: str, **more: Any) -> ApiResource:
    return ApiResource(group="", version="v1", plural=plural, kind=kind, short_names=short, **more)


def _review_resource(group: str, plural: str, kind: str, *, namespaced: bool = False) -> ApiResource:
    return ApiResource(group=group, version="v1", plural=plural, kind=kind, is_namespaced=namespaced, verbs=("create",))


_RBAC = "rbac.authorization.k8s.io"
_ADMISSION = "admissionregistration.k8s.io"


def _cluster_resource(group: str, plural: str, kind: str, *short: str) -> ApiResource:
    return ApiResource(group=group, version="v1", plural=plural, kind=kind, is_namespaced=False, short_names=short)


BUILT_IN_RESOURCES = (
    _core_resource("namespaces", "Namespace", "ns", is_namespaced=False, has_status=True),
    _core_resource("pods", "Pod", "po", has_status=True, subresources={"log": "Pod", "binding": "Binding"}),
    _core_resource("configmaps", "ConfigMap", "cm"),
    _core_resource("secrets", "Secret"),
    _core_resource("services", "Service", "svc", has_status=True),
    _core_resource("serviceaccounts", "ServiceAccount", "sa"),
    _core_resource("events", "Event", "ev"),
    _core_resource("nodes", "Node", "no", is_namespaced=False, has_status=True),
    ApiResource(group="apps", version="v1", plural="deployments", kind="Deployment", short_names=("deploy",)),
    ApiResource(group="coordination.k8s.io", version="v1", plural="leases", kind="Lease"),
    ApiResource(group=_RBAC, version="v1", plural="roles", kind="Role"),
    ApiResource(group=_RBAC, version="v1", plural="rolebindings", kind="RoleBinding"),
    _cluster_resource(_RBAC, "clusterroles", "ClusterRole"),
    _cluster_resource(_RBAC, "clusterrolebindings", "ClusterRoleBinding"),
    _cluster_resource(_ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy"),
    _cluster_resource(_ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding"),
    _cluster_resource("apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", "crd", "crds"),
    _review_resource("authorization.k8s.io", "subjectaccessreviews", "SubjectAccessReview"),
    _review_resource("authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview"),
    _review_resource("authentication.k8s.io", "selfsubjectreviews", "SelfSubjectReview"),
)


def custom_resources(definition: Mapping[str, Any]) -> list[ApiResource]:
    """Return the resources of a CustomResourceDefinition, one for each version."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        ApiResource(
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
