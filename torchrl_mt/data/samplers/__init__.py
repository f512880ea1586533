"""Samplers of clips and of whole episodes."""
