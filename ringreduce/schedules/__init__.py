"""Schedules as data: their definition, proof, predicted time, and drawing as text."""
