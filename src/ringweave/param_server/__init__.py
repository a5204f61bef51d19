"""Asynchronous parameter server of PS-HRA: rings of workers push, one server applies each push at once.

docs/explanation/ps-hra.md explains its rules.
"""
