"""Verbs that submit jobs, look at them and ask something of them, the same in all places."""
