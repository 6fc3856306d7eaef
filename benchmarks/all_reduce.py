"""How fast all-reduce is here, beside MPI's own and Gloo's: `ringreduce bench`, under mpirun.

mpirun -n 2 python benchmarks/all_reduce.py -b 8 -e 128M --json rows.jsonl --plot all_reduce.png
"""

import sys

from ringreduce.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(prog="python benchmarks/all_reduce.py"))
