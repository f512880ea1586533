"""The formats of data sets on disk, one module each."""
