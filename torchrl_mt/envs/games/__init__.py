"""Games whose best return is known, so that training on them can be told right from wrong."""
