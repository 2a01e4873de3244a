"""The demo checkpoint: a 24.6 M model of K3's architecture that knows a closed world of drawings.

``checkpoint/`` is the model itself, a checkpoint directory like any other. Beside it lies what it
was made with: the scene generator (``atlas``, ``scene``, ``tasks``, ``words``, ``paint``), the
training (``train`` and the modules it names) and the held-out questions (``heldout``,
``floor``) that ``k3vl eval`` asks. None of it uses the pipeline: torch, numpy, Pillow, safetensors
and tokenizers are all it needs.
"""
