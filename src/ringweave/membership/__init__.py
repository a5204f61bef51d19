"""Who takes part in a job: epochs of membership, agreed by all, through deaths, pauses, joins and leaves."""
