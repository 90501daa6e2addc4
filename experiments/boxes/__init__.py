"""How can kernels be fused that a compiler cannot look into: by pasting text, as traced rules, or by torch.compile?"""

NAME = "black_boxes"
PARTS = ("pasted", "opaque", "epilogues")
