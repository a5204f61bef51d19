"""Import path of processes that run as Pods."""
