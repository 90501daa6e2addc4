"""What a floor sees of an optimizer, how its state is stored, and the numbers of each parameter."""
