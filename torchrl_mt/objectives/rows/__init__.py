"""Training rows: their keys, and how entries are read, checked and written."""
