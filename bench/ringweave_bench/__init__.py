"""Benchmark harness: compares systems on the same nodes, links and ranks, and injects faults into jobs."""
