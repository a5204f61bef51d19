"""Why a job is over, or a member is out: texts that others look for."""

ALL_DONE = "all workers are done"
NOBODY_LEFT = "no worker is left that has the parameters: go on from the last checkpoint"
ALL_LEFT = "all workers have left"
FOLLOWED = "its slot was given to another process"
FINISHED = "it has finished"
"""What an event says of a member that is none any more since it has done all there was to do."""
WITHOUT_IT = "the others went on without it"
