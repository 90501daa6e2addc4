"""How close is one step of PagedAdamW to a copy of its bytes, and how far from torch's own steps?"""

NAME = "fused_step"
PARTS = ("close_to_a_copy", "host_time", "first_step")
