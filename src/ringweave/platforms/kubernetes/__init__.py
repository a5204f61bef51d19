"""Kubernetes platform: the TrainingJob resource and its operator (docs/how-to/jobs-kubernetes.md)."""
