"""Probing: measures the network between the nodes of a job."""
