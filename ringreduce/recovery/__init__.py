"""Training that goes on after ranks are lost, leave or join.

So far: `slots` keeps arrays in memory that outlives the process that writes it, and `state` gives
them to a training loop.
"""
