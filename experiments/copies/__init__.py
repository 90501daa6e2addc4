"""What may a copy be: how large, which way, between whom, and by whom?"""

NAME = "copies"
PARTS = ("addresses", "direction", "size", "small", "on_device", "peer")
