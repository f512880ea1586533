"""Private names of TorchRL, tensordict, torch and transformers: one module for each host."""
