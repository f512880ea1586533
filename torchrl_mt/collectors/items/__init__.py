"""What episodes are reset with: items from data, from curricula, and where a run goes on in them."""
