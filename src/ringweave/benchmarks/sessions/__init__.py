"""Workers that are alive: the channel to each, and one system's workers together."""
