"""Local platform: jobs on this machine, with a supervisor process per job and an agent process per node."""
