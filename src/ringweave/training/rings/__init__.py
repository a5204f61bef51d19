"""Rings of equally fast workers, tied together by a parameter server: modes `ps-hra` and `ps`."""
