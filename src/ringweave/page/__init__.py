"""The page of a run: its events, aggregated, as a live page (`ringweave ui`) and as one file (`ringweave report`)."""
