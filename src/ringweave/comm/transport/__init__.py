"""Moving pieces of messages between two ranks."""
