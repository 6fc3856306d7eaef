"""What Linux says of this process, its host and other processes, and what is asked of Linux."""
