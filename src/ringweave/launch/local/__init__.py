"""Launcher for workers on this machine."""
