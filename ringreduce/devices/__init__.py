"""Allocate, copy and reduce arrays in the memory of a device."""
