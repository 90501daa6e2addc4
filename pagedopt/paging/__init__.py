"""Pages of a range: where they begin, which stay, in which order the others visit.  No torch and no device."""
