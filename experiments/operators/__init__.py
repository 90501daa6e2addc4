"""What must torch be told of a kernel, and what can it look into?"""
