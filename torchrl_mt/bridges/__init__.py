"""Bridges to other projects, a folder for each, with what its users know under the names that they know.

They stand on the public names of the other packages, which know nothing of them.
"""
