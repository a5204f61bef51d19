"""Two servers of one job: one leads, the other follows what it acknowledges and takes over. Why so: decision 0026."""
