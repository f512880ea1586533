"""Episodes as arrays and texts: what files hold."""
