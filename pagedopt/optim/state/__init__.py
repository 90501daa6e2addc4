"""State of an optimizer: the interface that steps and loading use, its columns, encoding, and scalars."""
