"""An event loop in a thread of its own, driven from ordinary code, and blocking calls beside it."""
