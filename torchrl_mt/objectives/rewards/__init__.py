"""Reward sources: episodes, callables, models, servers, and mixes of them by label."""
