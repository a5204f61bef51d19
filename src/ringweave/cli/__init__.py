"""Command line of ringweave: one file per verb, loaded when the verb is called."""
