"""What somebody asks for: the job file and flags in, one checked `Request` out."""
