"""Transport: messages between two ranks over TCP, shared memory and cross-memory reads."""
