"""K3's chat format, text only: messages to tokens, tokens to events. No torch, no PIL, no numpy."""

from k3vl.xtml.messages import parse_messages, parse_tools
from k3vl.xtml.parser import Answer, StreamParser, collect
from k3vl.xtml.records import parse_record, render_record
from k3vl.xtml.render import ImagePrompts, media_parts, render
from k3vl.xtml.tokenizer import Detokenizer, Tokenizer, decode, encode, load_tokenizer, media_spans
from k3vl.xtml.tokens import Piece, Segment
from k3vl.xtml.transcript import Transcript, parse_ids, parse_segments

__all__ = [
    "Answer",
    "Detokenizer",
    "ImagePrompts",
    "Piece",
    "Segment",
    "StreamParser",
    "Tokenizer",
    "Transcript",
    "collect",
    "decode",
    "encode",
    "load_tokenizer",
    "media_parts",
    "media_spans",
    "parse_ids",
    "parse_messages",
    "parse_record",
    "parse_segments",
    "parse_tools",
    "render",
    "render_record",
]
