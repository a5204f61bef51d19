"""Hosts platform: one run on machines that are reached by ssh; nothing has to run there before.

Each host runs a host service for the length of the run. The services keep copies of the run's record and elect a
leader among themselves; the leader controls the run. So any host, and the command that started the run, may be lost.
"""
