"""Compile Python functions to machine code that needs no interpreter, and keep the code."""
