"""What does each rung of the ladder (loop, foreach, fused, compiled, graph, one pointer list) launch, cost and need?"""

NAME = "optimizer_ladder"
PARTS = ("counts", "trucks", "pareto", "alignment")
