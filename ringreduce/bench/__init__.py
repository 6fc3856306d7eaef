"""`ringreduce bench`: time collectives on this machine beside MPI's own and Gloo's."""
