"""The server's side: the parameters with their optimizer, what is done with a message, snapshots, the process."""
