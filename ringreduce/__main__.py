"""``python -m ringreduce`` is the command `ringreduce`."""

import sys

from ringreduce.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
