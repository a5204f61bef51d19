"""Engine: runs the collectives of a group by compiled schedules."""
