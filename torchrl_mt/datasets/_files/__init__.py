"""What the formats share: reading, writing, and files that are whole at every moment."""
