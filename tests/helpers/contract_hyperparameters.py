"""The contract: hyperparameters."""
