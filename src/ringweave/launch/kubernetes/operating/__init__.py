"""The operator: looks at a TrainingJob and its objects, asks `reconcile` what to do, does it, and looks again."""
