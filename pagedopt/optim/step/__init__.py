"""A step: whose parameters, with which hyperparameters, in which launches, and what has changed since the last."""
