"""Where rewards come from: episodes, callables, models, servers, and mixes of them by label."""
