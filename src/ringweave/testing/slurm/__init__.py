"""A real Slurm cluster on one Linux machine: controller, node daemons and munge, with nodes as namespaces of a lab."""

from ringweave.testing.slurm.cluster import SlurmCluster, problems

__all__ = ["SlurmCluster", "problems"]
