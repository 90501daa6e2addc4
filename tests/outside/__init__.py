"""What a stranger makes with public names and nothing else: an optimizer, a format, a placement and a transport."""
