"""Record what each rank does over time, and make one file of the records."""
