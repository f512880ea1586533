"""What the storage holds: whole episodes in columns, without TorchRL."""
