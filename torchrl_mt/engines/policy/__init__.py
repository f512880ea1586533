"""Engine for TorchRL's language-model policies."""
