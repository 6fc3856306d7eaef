"""From a schedule to byte ranges: choose an algorithm, cut the array, lay out scratch memory."""
