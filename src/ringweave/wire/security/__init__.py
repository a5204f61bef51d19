"""Who may talk: names, the authority of a job, what each of its processes is given, and how a stranger is refused."""
