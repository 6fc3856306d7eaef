"""Move bytes between ranks: by MPI, by sockets, or among threads of one process."""
