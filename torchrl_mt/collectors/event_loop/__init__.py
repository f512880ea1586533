"""An event loop in a background thread, and threads for blocking calls."""
