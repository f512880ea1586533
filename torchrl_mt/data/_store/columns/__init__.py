"""Columns: how entries of stored steps lie in memory."""
