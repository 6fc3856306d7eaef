"""`ringreduce bench`: how fast this machine adds arrays, beside the other ways that it has."""
