"""Start the ranks of a job, watch them, and decide what follows: all in the launcher's process."""
