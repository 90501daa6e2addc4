"""What stands on an optimizer: a shadow run beside torch, and a call that makes room when memory runs out."""
