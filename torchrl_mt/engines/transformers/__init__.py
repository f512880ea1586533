"""Engine for transformers models: batched conversations with cached prefixes."""
