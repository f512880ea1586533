"""Training rows: where their entries lie, and how they are read, checked and written."""
