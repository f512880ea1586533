"""Credit over time: returns and advantages, counted in sampled tokens or turns."""
