"""Elastic training: workers join and leave while the job runs, and no train step is lost when a worker dies."""
