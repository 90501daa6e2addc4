"""What the lectures claim, and what was measured of it: ``python -m experiments lecture`` writes ``notes/lecture.md``.

``experiments/claims.toml`` has the claims, ``readings`` what rows say to them where one row does not decide, ``page``
the note.
"""
