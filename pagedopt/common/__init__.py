"""What the whole package uses and what needs no torch: units, names, tables of facts."""
