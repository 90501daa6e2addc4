"""How much of a step whose state is on the host vanishes under the next forward, and what is the least it can take?"""

NAME = "hidden_step"
PARTS = ("iteration", "streams", "loads", "offloaders", "loader")
