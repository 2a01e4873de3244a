"""K3 for transformers: importing this package registers it with the Auto classes.

After ``import k3vl.hf``, ``AutoConfig``, ``AutoProcessor``, ``AutoModelForImageTextToText`` and
``pipeline("image-text-to-text")`` take a K3 checkpoint directory, without remote code. The classes
are adapters over ``k3vl.lm``, ``k3vl.vision`` and ``k3vl.xtml``; nothing is implemented twice.
This is the only part of k3vl that imports transformers.
"""

from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from k3vl.hf.cache import KimiK3Cache
from k3vl.hf.configuration import KimiK3Config
from k3vl.hf.modeling import KimiK3ForConditionalGeneration
from k3vl.hf.processing import KimiK3Processor
from k3vl.hf.tokenization import KimiK3Tokenizer

__all__ = [
    "KimiK3Cache",
    "KimiK3Config",
    "KimiK3ForConditionalGeneration",
    "KimiK3Processor",
    "KimiK3Tokenizer",
]

AutoConfig.register("kimi_k3", KimiK3Config)
AutoTokenizer.register(KimiK3Config, tokenizer_class=KimiK3Tokenizer)
AutoProcessor.register(KimiK3Config, KimiK3Processor)
AutoModelForImageTextToText.register(KimiK3Config, KimiK3ForConditionalGeneration)
