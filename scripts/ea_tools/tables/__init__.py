"""Tables of results: what to train, records of finished runs, pages, sweeps."""
