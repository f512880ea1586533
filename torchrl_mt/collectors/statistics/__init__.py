"""Counters, times and the progress bar of a run."""
