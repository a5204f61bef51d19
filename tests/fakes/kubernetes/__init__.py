"""Fake Kubernetes API server: real HTTP, objects in memory, the rules of a real server.

It is no cluster: it has no scheduler, controller or kubelet unless a test runs one. Missing parts answer with an error:
server-side apply, protobuf, conversion of versions. Paged lists are sent whole."""
