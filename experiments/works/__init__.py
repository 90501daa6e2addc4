"""What is measured: models, optimizers that step over them, the judge of their updates, lists of tiny tensors."""
