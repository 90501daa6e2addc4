"""What a stranger makes with public names alone: an optimizer, a format, a placement, a transport and a kernel."""
