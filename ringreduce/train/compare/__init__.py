"""Compare strategies: train with each of them in turns, and put their figures into one table."""
