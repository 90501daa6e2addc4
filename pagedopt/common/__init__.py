"""What every floor uses and what needs no torch: units, names, tables of facts."""
