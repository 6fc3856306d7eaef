"""Kill ranks, launchers and mpiexecs of jobs that go on, and prove that nothing is lost.

    python -m tests.long_recovery --times 200 --record
    python -m tests.long_recovery points
    python -m tests.long_recovery stopped --times 50 --record
    python -m tests.long_recovery launchers --times 50 --record
    python -m tests.long_recovery resizes --times 60 --record
    python -m tests.long_recovery losses --times 300 --record
    python -m tests.long_recovery bits --times 20 --record

- ``random`` (the default): ranks are killed at random moments, a quarter of them two at once.
- ``points``: each rank is killed before, in and after each call of a training step, at each part of
  an update, and in each state of the recovery itself; without ``--times`` at all points.
- ``live`` and ``live-points``: the same under Open MPI, where survivors go on in their processes.
- ``stopped`` and ``live-stopped``: ranks are stopped by SIGSTOP, with timeouts of 1, 2 and 5 s.
- ``losses`` and ``live-losses``: one job loses ranks 300 times.  In the end its launcher and its
  ranks have no more open files and mappings than after the first loss.
- ``resizes`` and ``live-resizes``: jobs get more and fewer ranks, by command and by SIGTERM to a
  rank; in some jobs ranks are killed while others start.
- ``handover-points`` and ``live-handover-points``: each rank is killed at each point of such a
  change.
- ``soak``: for 60 minutes a rank is killed every 10 seconds, and the number of ranks changes every
  minute; the memory of launcher and ranks stays within 5 %.
- ``bits``: runs of the trainer with ``--batch-shards`` lose ranks and get another number of them,
  by kills, by command and by SIGTERM to a rank; each step is reported once.
- ``launchers``: launchers and mpiexecs are killed, and the jobs are resumed.

All but the last two count samples: each sample must count once in every epoch.  The last two
compare the bits of the parameters with those of an undisturbed run.  ``--record`` writes the
figures to ``bench_results/recovery.jsonl``.  Exits with 1 if anything is wrong, or left behind, and
prints the command that repeats the proof.
"""
