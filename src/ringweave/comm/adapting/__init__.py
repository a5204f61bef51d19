"""Adapting while a job runs: ranks consult now and then, the first one rules, and all follow."""
