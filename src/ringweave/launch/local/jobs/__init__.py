"""Jobs on this machine, with no service to install: a registry, one supervisor for each job, one agent for each group.

Everything that a job has lies in one folder and one row; whoever is killed, the next look finds what there is.
"""
