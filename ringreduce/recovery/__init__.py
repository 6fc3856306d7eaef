"""Let a rank go on training after other ranks are lost.

`slots` keeps arrays in memory that outlives the process that writes it, and `state` gives them to a
training loop.  `elastic` runs the loop in a rank.  The launcher's part is `ringreduce.supervisor`.
"""
