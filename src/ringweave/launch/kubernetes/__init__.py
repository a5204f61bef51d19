"""Jobs on Kubernetes: the resource TrainingJob, the operator that leads each to its end, and `--on kubernetes`.

`resource/` is what the API server knows of a TrainingJob, `objects/` what a job becomes (ConfigMap, Service, Secret,
Pods) and how it is seen again, `api/` speaks to an API server, `operating/` is the operator. docs/jobs-kubernetes.md.
"""
