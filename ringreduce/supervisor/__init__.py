"""Start the ranks of a job, watch them, and decide what follows, in the launcher's process."""
