"""Messages from one rank to another, apart from all collectives: matching, waiting, errors.

Messages take one of two roads: mailboxes in memory that ranks share, or a transport.
"""
