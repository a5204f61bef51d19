"""Launcher: starts, watches and stops the workers of a run on one machine, restarts them if the run is elastic."""
