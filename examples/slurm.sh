#!/bin/bash
#SBATCH --job-name=ringreduce
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# Run a script on all ranks of a Slurm job.  Start it from the repository, with the environment
# active in which ringreduce is installed, on a file system that all nodes see:
#
#     sbatch examples/slurm.sh
#
# It writes what examples/mean_of_gradients.py prints, for 16 ranks, into ringreduce-JOB.out.
# To run another script: sbatch examples/slurm.sh my_script.py --its options
set -euo pipefail

if [ $# -eq 0 ]; then
    set -- examples/mean_of_gradients.py
fi
# The nodes and the ranks of each: node1:8,node2:8
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" |
    sed "s/\$/:$SLURM_NTASKS_PER_NODE/" | paste -sd ,)
# MPICH then starts its processes by srun and needs no ssh.  Open MPI does so by itself.
export HYDRA_LAUNCHER=slurm

exec ringreduce run -n "$SLURM_NTASKS" --hosts "$hosts" "$@"
