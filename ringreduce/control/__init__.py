"""The control protocol: numbers and signatures of calls, aborts, alarms and the texts of errors."""
