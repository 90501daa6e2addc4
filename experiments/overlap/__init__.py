"""How much of a step whose state is on the host vanishes beside other work?"""
