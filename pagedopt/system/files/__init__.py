"""Files, mappings and memory of the host."""
