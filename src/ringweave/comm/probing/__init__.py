"""What the network between a job's nodes really carries, measured among its ranks: `-m ringweave.comm.probing`."""
