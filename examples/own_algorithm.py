"""Write an algorithm, prove it, draw it and run it.

The algorithm below is two rings: half of the chunks go to the right and half to the left, so that
both directions of each link carry data.

    ringreduce run -n 2 examples/own_algorithm.py

prints what follows, and draws the steps of four ranks in both_ways.svg:

    step  rank 0                  rank 1                  rank 2
       0   >1:2 >2:4 <2:1+ <1:5+   >2:0 >0:5 <0:2+ <2:3+   >0:1 >1:3 <1:0+ <0:4+
       1   >1:1 >2:5 <2:0+ <1:3+   >2:2 >0:3 <0:1+ <2:4+   >0:0 >1:4 <1:2+ <0:5+
       2   >1:0 >2:3 <2:2 <1:4     >2:1 >0:4 <0:0 <2:5     >0:2 >1:5 <1:1 <0:3
       3   >1:2 >2:4 <2:1 <1:5     >2:0 >0:5 <0:2 <2:3     >0:1 >1:3 <1:0 <0:4
    >1:2 sends chunk 2 to rank 1; <2:1+ adds chunk 1 from rank 2; <2:2 overwrites chunk 2 with rank 2's
    proven for 2 to 8 ranks; with 4 ranks chunk 0 is (0, ((1, 2), 3))
    2 ranks sum [0 1 2 3 4 5] to [ 0  2  4  6  8 10]
"""  # noqa: E501 - a line of the output is that long

from pathlib import Path

import numpy as np

import ringreduce as rr
from ringreduce.algorithms import build
from ringreduce.picture import to_svg
from ringreduce.schedules.check import check
from ringreduce.schedules.draw import draw
from ringreduce.schedules.schedule import Recv, Send, Step


def both_ways(size, rank):
    """Pass chunks 0 to size - 1 to the right and the others to the left, as two rings do."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(2 * (size - 1)):
        reduce = step < size - 1  # later steps pass finished chunks on
        to_right, to_left = rank - step - 1, rank + step + 1
        yield Step(
            sends=(Send(right, (to_right % size,)), Send(left, (size + to_left % size,))),
            recvs=(
                Recv(left, ((to_right - 1) % size,), reduce=reduce),
                Recv(right, (size + (to_left + 1) % size,), reduce=reduce),
            ),
        )


rr.register_algorithm("both_ways", both_ways, chunks=lambda size: 2 * size)
with rr.init() as comm:
    x = np.arange(6)
    total = comm.all_reduce(x, algorithm="both_ways")
    if comm.rank == 0:
        schedules = [build("all_reduce", "both_ways", [range(n)]) for n in range(2, 9)]
        proofs = [check(schedule) for schedule in schedules]  # raises ScheduleError if one is wrong
        print(draw(schedules[1]))
        print(f"proven for 2 to 8 ranks; with 4 ranks chunk 0 is {proofs[2].results[0]}")
        Path("both_ways.svg").write_text(to_svg(schedules[2]))
        assert np.array_equal(total, x * comm.size)
        print(f"{comm.size} ranks sum {x} to {total}")
