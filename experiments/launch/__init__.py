"""Where does the time go when the kernels are short, and which fusion brings it back?"""

NAME = "launch_overhead"
PARTS = ("puzzlers", "saturation", "replays", "eager", "numerics", "reasons")
