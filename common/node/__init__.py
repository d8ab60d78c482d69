"""The node: a process that owns the cache's memory and index, shared by all engines of one user on a machine."""
