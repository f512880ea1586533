"""From batches of steps to whole episodes: what the writer is made of."""
