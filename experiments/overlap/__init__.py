"""How much of a step whose state is on the host vanishes under the next forward, and what is the least it can take?"""

NAME = "hidden_step"
#: The last one leaves a profiler behind, which makes every launch slower.
PARTS = ("iteration", "loads", "offloaders", "loader", "streams")
