"""An API server of Kubernetes for tests: real HTTP, objects in memory, the rules that a real server holds to.

It is no cluster: there is no scheduler, no controller and no kubelet, unless a test plays one (`kubelet.py`). What is
left out says so with an error: server-side apply, protobuf, conversion of versions; lists in pages are sent whole.
"""
