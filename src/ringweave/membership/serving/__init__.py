"""The coordinator's process, and what it is asked over the wire."""
