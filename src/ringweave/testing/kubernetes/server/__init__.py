"""The API server itself: objects in memory, what may be done with them, and HTTP."""
