"""The trainer as a job's program: its own options follow."""

import sys

from ringreduce.train.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
