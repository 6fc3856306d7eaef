"""Execute a plan through memory that the ranks of one host share, in compiled code."""
