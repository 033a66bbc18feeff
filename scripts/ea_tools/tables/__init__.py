"""Tables of results: cells, records of finished runs, pages, sweeps."""
