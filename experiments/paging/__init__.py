"""What does a step cost when its state is not on the device, and is that the price of the bytes alone?

268 M float32 parameters, 2.1 GB of AdamW state.
"""

NAME = "paged_state"
PARTS = ("link", "sweep", "graph", "rivals", "memory", "state_file")
