"""What does compiling late cost at the start, and what does compiling early cost in builds?"""

NAME = "jit_or_aot"
PARTS = ("start", "matrix")
