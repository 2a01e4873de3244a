"""The chat demo in the browser (Gradio): ``k3vl demo``.

Read ``launch.py`` for what is served and how it is locked down, ``page.py`` for the layout,
``session.py`` for one visitor's conversation, ``model.py`` for the seam to whoever answers. Only
``page.py``, ``look.py`` and ``launch.py`` know Gradio.
"""
