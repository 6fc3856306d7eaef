"""Move bytes between ranks: over MPI, or among threads of one process."""
