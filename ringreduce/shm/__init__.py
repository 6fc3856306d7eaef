"""Execute a plan through memory that the ranks of one host share, in compiled code.

Repeated calls need no Python (`fast_path`, `entry`).  The same memory has the mailboxes of messages
between two ranks, and arrays in blocks that all ranks add to.
"""
