"""What every experiment shares: ``main`` (options, files), ``run`` (what a question measures with), ``time`` (the only
clock), ``rows`` (what was measured), ``show`` and ``plot`` (tables, bars, plots as values), ``child`` (a process of its
own), ``fingerprint`` (of what is measured), ``note``.

A question is a module with ``measure(run)``, which yields rows, and, as far as it has them, ``derive(rows)``,
``TABLES``, ``PLOTS``, ``BARS`` and ``TEXTS``.  An experiment of several questions is a folder whose ``__init__`` has
``NAME`` and ``PARTS``.  Nothing is imported here: a child process loads what it needs and no more.
"""
