"""The engine on transformers models: many conversations in one batch, with cached prefixes."""
