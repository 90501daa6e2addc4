"""Choice 3: where state lives."""
