"""Games with a known best return, to check training against."""
