"""Compile Python functions to machine code that needs no interpreter, and keep the code.

A record gives a layout of memory to Python, NumPy, mypy and compiled code.
"""
