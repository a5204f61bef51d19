"""Topology inference: the tree of switches and all rates, from the rates of flows between nodes. Pure: no sockets.

`infer_topology` decides what to measure, batch by batch; `cluster_from_fit` makes a cluster of the result.
"""
