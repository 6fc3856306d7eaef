"""Training that goes on after ranks are lost.

`slots` keeps arrays in memory that outlives the process that writes it, and `state` gives them to a
training loop.  `elastic` runs the loop in a rank.  `membership` decides who belongs to the job;
`ringreduce.launch.supervisor` carries it out, with the memory files that it holds (`held`).
"""
