"""Policy objectives: one per file, all with the same arguments."""
