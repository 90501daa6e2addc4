"""Loading a state dict: other libraries' words, what must hold, and copying without an interrupt."""
