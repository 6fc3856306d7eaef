"""The command line: start jobs, explain collectives, and examine the installation.

Each rank that it starts runs `rank_main`, which runs the user's program.
"""
