"""Node agent: runs the workers of one node in one attempt of a job; the same program on every platform.

The agent reports that its node is ready, waits at the start barrier, starts its workers when all nodes were ready,
watches them, and reports their progress and their end. Platforms differ only in the `AgentChannel`.
"""
