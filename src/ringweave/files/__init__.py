"""Files that people write by hand, and file I/O that every package shares."""
