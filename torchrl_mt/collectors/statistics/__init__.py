"""What is counted and told of a run."""
