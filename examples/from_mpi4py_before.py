"""Find the largest eigenvalue of a matrix (power iteration), with mpi4py alone.

`from_mpi4py_after.py` is this program with ringreduce: three lines differ.

    ringreduce run -n 2 examples/from_mpi4py_before.py

prints

    2 ranks: largest eigenvalue 8.9384021156
    as NumPy finds it: True
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD

n = 200
rows = np.arange(n)
matrix = 1 / (1 + np.abs(rows[:, None] - rows))
mine = np.array_split(rows, comm.size)[comm.rank]  # the columns of this rank

x = np.ones(n)
product = np.empty(n)
for _ in range(200):
    part = matrix[:, mine] @ x[mine]
    comm.Allreduce(part, product, op=MPI.SUM)
    eigenvalue = np.linalg.norm(product)
    x = product / eigenvalue

if comm.rank == 0:
    print(f"{comm.size} ranks: largest eigenvalue {eigenvalue:.10f}")
    print("as NumPy finds it:", np.allclose(eigenvalue, np.linalg.eigvalsh(matrix)[-1]))
