"""What all objects of a job have: labels to find them by, and the job as their owner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringweave.launch.kubernetes import names

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The TrainingJob that an object belongs to."""

    name: str
    namespace: str
    uid: str
    """A job of the same name that is made later has another one."""

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> "Owner":
        """The owner that a TrainingJob is."""
        metadata = resource["metadata"]
        return cls(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])

    def metadata(self, name: str, **labels: str) -> Object:
        """Metadata of an object of this job."""
        reference = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        ours = {"app.kubernetes.io/managed-by": "ringweave", names.JOB_LABEL: self.name}
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": {**ours, **labels},
            "ownerReferences": [reference],
        }

    def owns(self, found: Mapping[str, Any]) -> bool:
        """The object is this job's, and not one of another job of that name or of somebody else."""
        references = found["metadata"].get("ownerReferences", ())
        return any(reference["uid"] == self.uid for reference in references)

    @property
    def selector(self) -> str:
        """Finds all objects of jobs of this name."""
        return f"{names.JOB_LABEL}={self.name}"
