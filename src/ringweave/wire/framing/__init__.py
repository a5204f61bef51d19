"""What goes over a connection: frames, the messages in them, and the bounds of both."""
