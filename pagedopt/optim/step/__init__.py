"""One optimizer step: its parameters, hyperparameters and launches, and what has changed since the last step."""
