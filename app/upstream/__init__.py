"""Answers from an OpenAI-compatible endpoint elsewhere, behind the same :class:`Engine` seam.

``messages.py`` writes what is asked, ``endpoint.py`` sends it, ``answers.py`` reads what comes
back, ``engine.py`` joins them, ``discovery.py`` asks what the endpoint has. Media were fetched,
checked and repaired here before; see ``k3vl.vision.portable``.
"""
