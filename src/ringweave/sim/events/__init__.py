"""One collective, event by event: a clock, streams that share links, ranks that follow their programs."""
