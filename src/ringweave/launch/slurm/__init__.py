"""Jobs on Slurm: one allocation with GPUs spread as the split says, and a controller of the job's own inside of it.

Nothing stays where people log in. What has to survive lies in a folder of the shared file system; docs/jobs-slurm.md.
"""
