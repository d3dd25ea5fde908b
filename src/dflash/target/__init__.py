"""The frozen side: load a target, capture its context layers, make its labels, keep both on disk."""
