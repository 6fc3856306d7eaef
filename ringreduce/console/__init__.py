"""The output of commands: lines that fit the terminal, colours, and a live line of progress."""
