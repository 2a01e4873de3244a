"""Kimi K3's media front end inside SGLang: the only package that imports ``sglang``.

SGLang serves the language model and the vision tower; what stands here gives it video, the order of
media in a prompt, our chat format and our media rules. See ``docs/sglang.md``.

- ``plugin``: the entry point that SGLang calls in every process.
- ``settings``: what the plugin is told, over ``--mm-process-config``.
- ``slots``: prompts in which one pad stands for each picture or clip.
- ``chat``: OpenAI messages to such a prompt.
- ``answers``: what the model answers to SGLang's replies.
- ``processors``: such a prompt and its media to token ids and encoder items.
"""
