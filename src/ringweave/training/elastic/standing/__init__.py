"""Where a member of an elastic job stands, and what moves it on: reductions that count, and epochs that begin."""
