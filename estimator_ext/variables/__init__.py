"""Variables on a ring: those that differ by rank, cached reads, and the check that ranks agree."""
