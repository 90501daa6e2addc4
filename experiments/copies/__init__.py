"""What may a copy be: how large, in which direction, between which memories, and by which call?"""

NAME = "copies"
PARTS = ("kinds", "size", "peer")
