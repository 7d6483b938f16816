"""Variables on a ring: those that differ by rank, and the check that ranks agree."""
