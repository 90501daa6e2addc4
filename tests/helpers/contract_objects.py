"""The contract: objects."""
