"""Tools on top of the optimizers: a comparison with torch's, and a retry that makes room when memory runs out."""
