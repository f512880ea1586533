"""A store on disk: files that are there whole or not at all."""
