"""Choose an algorithm for a call, and turn its schedule into offsets in memory.

`one_step` is a second planner, for the direct all-to-all, whose counts may be new in each call.
Tests compare its plans with those of `plan`.
"""
