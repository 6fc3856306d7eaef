"""What holds and adds arrays."""
