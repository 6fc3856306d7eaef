"""The command line: start jobs, watch ranks, examine the installation, explain schedules."""
