"""Schedules as data: their vocabulary, their proof, their price and their drawing as text."""
