"""Search for settings by the time of a step: price candidates, measure the best, name the fastest.

`candidates` lists the settings to choose from, `prices` predicts their times, `halving` decides
which are measured for how long, and `measuring` makes their steps.  `finding` puts them together.
"""
