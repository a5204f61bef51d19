"""What the API server knows of a TrainingJob: its schema with rules, how it becomes a job, and how a job is told."""
