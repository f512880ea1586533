"""An event loop in a background thread, and its background tasks."""
