"""Items that episodes are reset with: from data or curricula, with a position to resume from."""
