"""One compiled call that looks at an optimizer, launches its step and counts it: what it relies on, and its record."""
