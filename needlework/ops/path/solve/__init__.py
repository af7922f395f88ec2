"""LUCID-PaTH's solve: values solved against the overlap of keys that PaTH's factors have moved, for PaTH attention to read."""
