"""The control protocol: calls are numbered and signed, aborted, timed out, and errors described."""
