"""Counters and times of a run."""
