"""The engine on any of TorchRL's language-model policies."""
