"""What the lectures claim, and what was measured of it: ``python -m experiments lecture`` writes the notes.

``experiments/claims.toml`` has the claims, ``readings`` what rows say to them where one row does not decide, ``page``
``notes/claims.md`` and the quotes in ``notes/lecture.md``.
"""
