"""What a TrainingJob becomes in the API server, and how that is seen again. Pure: objects in, objects out."""
