"""Choice 2: how one list of tensors is stored."""
