"""``python -m ringreduce`` is the command `ringreduce`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, whose modules are not the launcher's
    from ringreduce.launch.cli import main

    sys.exit(main())
