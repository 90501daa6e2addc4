"""What must torch be told of a kernel, and what does it do with what it is told?"""

NAME = "custom_op"
PARTS = ("told", "lies", "ways")
