"""How many bytes does fusing save, and when does it cost more than it saves?"""

NAME = "vertical_fusion"
PARTS = ("traffic", "roofline", "spill", "rewrite")
