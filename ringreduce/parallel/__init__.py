"""Train any model on several ranks: replicas, shards, pipelines and parameter servers.

Its public names are those of `ringreduce.train`; this package does not know the trainer.
"""
