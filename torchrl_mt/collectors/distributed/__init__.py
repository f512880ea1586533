"""Collectors whose episodes are played in other processes, on this machine or on others."""
