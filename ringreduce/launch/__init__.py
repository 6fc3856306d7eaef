"""The command line: start jobs, examine the installation, explain; and how a rank begins."""
