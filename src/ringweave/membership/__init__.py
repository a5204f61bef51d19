"""Membership of a job: generations of members that all members agree on, through failures, joins and leaves."""
