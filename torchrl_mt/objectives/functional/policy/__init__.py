"""Policy objectives: one a file, each a function of the same arguments."""
