"""Another package's optimizers, formats, placements and transports, made with public names alone."""
