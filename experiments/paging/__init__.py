"""What does a step cost when its state is not on the device, and is that the price of the bytes alone?

268 M float32 parameters, 2.1 GB of AdamW state.  The profiler of ``bytes`` slows what comes behind it on a GPU.
"""

NAME = "paged_state"
PARTS = ("link", "sweep", "graph", "rivals", "driver", "hidden", "memory", "spike", "bytes", "state_file")
