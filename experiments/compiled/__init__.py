"""What does torch.compile make of an optimizer, and when has its first step paid?"""

NAME = "compiled_optimizer"
PARTS = ("first_call", "recompiles", "kernels", "coverage", "generated")
