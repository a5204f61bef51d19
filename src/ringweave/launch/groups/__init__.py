"""Worker groups: the workers of one node in one attempt, led by a group agent that is the same program in all places.

The agent says that its node is ready, waits at the gate, starts its workers when all nodes were ready, watches them,
and reports how far they are and how they ended. What differs by place is a `Post`.
"""
