"""Number and sign calls, so that all ranks make the same call or raise the same error.

`executable` declares what runs a call.  The engine uses this protocol alone to run a call and to
break it off.
"""
