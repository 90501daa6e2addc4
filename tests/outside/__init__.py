"""An optimizer, a placement and a transport made as a stranger makes them: with public names and nothing else."""
