"""Training in rings that a parameter server ties together: modes `ps-hra` and `ps`."""
