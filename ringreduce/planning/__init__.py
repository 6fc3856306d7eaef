"""From a schedule to offsets in memory: choose an algorithm, divide the array, lay out scratch."""
