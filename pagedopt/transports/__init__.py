"""Choice 4: how the table reaches a kernel."""
