"""Experiments: one module per question.  ``python -m experiments`` lists them, ``… NAME`` runs one."""
