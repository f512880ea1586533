"""Conversations as training rows."""
