"""Training of any model on several ranks, on the library's public API.

Its public names are those of `ringreduce.train`; this package does not know the trainer.
"""
