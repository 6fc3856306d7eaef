"""Linux: cores, memory files, processes and sockets, and the place of this rank in its job."""
