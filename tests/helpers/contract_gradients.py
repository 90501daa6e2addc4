"""The contract: gradients."""
