"""Credit over time: returns and advantages over sampled tokens or turns."""
