"""Execute a plan by point-to-point messages, over any transport.

Each planned operation is bound to memory and to a request once.  Later calls start it again.
"""
