"""Priorities of clips, and draws in proportion to them."""
