"""The contract: loops."""
