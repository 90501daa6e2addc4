"""What a training takes, before it is begun: bytes, seconds, and the rates of this machine."""
