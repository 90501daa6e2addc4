"""What happens when a list still names memory that is gone, and who notices?"""

NAME = "pointer_lifetime"
PARTS = ("hazards",)
