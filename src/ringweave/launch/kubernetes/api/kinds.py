"""The resources of the API that we use, and the paths below which they are."""

from dataclasses import dataclass

from ringweave.launch.kubernetes import names


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One resource."""

    api_version: str
    kind: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of an object, or of the list of them; without a namespace of all of them."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        space = f"/namespaces/{namespace}" if namespace and self.is_namespaced else ""
        return root + space + "/" + "/".join(part for part in (self.plural, name, subresource) if part)


TRAINING_JOBS = Kind(api_version=names.API_VERSION, kind=names.KIND, plural=names.PLURAL)
PODS = Kind(api_version="v1", kind="Pod", plural="pods")
CONFIG_MAPS = Kind(api_version="v1", kind="ConfigMap", plural="configmaps")
SECRETS = Kind(api_version="v1", kind="Secret", plural="secrets")
SERVICES = Kind(api_version="v1", kind="Service", plural="services")
EVENTS = Kind(api_version="v1", kind="Event", plural="events")
NAMESPACES = Kind(api_version="v1", kind="Namespace", plural="namespaces", is_namespaced=False)
LEASES = Kind(api_version="coordination.k8s.io/v1", kind="Lease", plural="leases")
DEFINITIONS = Kind(
    api_version="apiextensions.k8s.io/v1",
    kind="CustomResourceDefinition",
    plural="customresourcedefinitions",
    is_namespaced=False,
)
ACCESS_REVIEWS = Kind(
    api_version="authorization.k8s.io/v1",
    kind="SubjectAccessReview",
    plural="subjectaccessreviews",
    is_namespaced=False,
)
SELF_ACCESS_REVIEWS = Kind(
    api_version="authorization.k8s.io/v1",
    kind="SelfSubjectAccessReview",
    plural="selfsubjectaccessreviews",
    is_namespaced=False,
)
SELF_REVIEWS = Kind(
    api_version="authentication.k8s.io/v1",
    kind="SelfSubjectReview",
    plural="selfsubjectreviews",
    is_namespaced=False,
)
