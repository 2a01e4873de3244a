"""``generate``, ``pipeline`` and the Auto classes against our own engine."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    DynamicCache,
    TextIteratorStreamer,
    pipeline,
)

import k3vl.hf
from k3vl.config import DEMO_CHECKPOINT, load_config
from k3vl.errors import BackendError, ConfigError, ShapeError
from k3vl.lm.engine import EngineConfig
from k3vl.pipeline import Pipeline
from k3vl.types import SamplingParams
from tests.hf.tiny_checkpoint import write_tiny

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPES, SIGN, CLIP = (EXAMPLES / name for name in ("shapes.png", "sign.jpg", "sailboat.mp4"))


def ask(text: str, *media: dict) -> list[dict]:
    return [{"role": "user", "content": [*media, {"type": "text", "text": text}]}]


TEXT = ask("Say something about the sea.")
IMAGE = ask("What is in the picture?", {"type": "image", "path": str(SHAPES)})
VIDEO = ask("What moves?", {"type": "video", "path": str(CLIP)})
MIXED = ask(
    "Compare them.",
    {"type": "image", "image": str(SIGN)},
    {"type": "video", "url": str(CLIP)},
    {"type": "image", "path": str(SHAPES)},
)
PROMPTS = pytest.mark.parametrize(
    "messages", [TEXT, IMAGE, VIDEO, MIXED], ids=["text", "image", "video", "mixed"]
)


@pytest.fixture(scope="module", params=["demo", "tiny"])
def directory(request, tmp_path_factory) -> Path:
    if request.param == "demo":
        return DEMO_CHECKPOINT
    return write_tiny(tmp_path_factory.mktemp("tiny") / "k3")


@pytest.fixture(scope="module")
def processor(directory):
    return AutoProcessor.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForImageTextToText.from_pretrained(directory)


@pytest.fixture(scope="module")
def engine(directory):
    with Pipeline.load(directory, engine=EngineConfig(exact_decode=True)) as ours:
        yield ours


def inputs(processor, messages, **options):
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )


def typed(messages: list[dict]) -> list[dict]:
    """The same messages as our pipeline takes them: paths are paths."""
    content = []
    for part in messages[0]["content"]:
        kind = part["type"]
        source = next((part[k] for k in ("path", "url", kind) if k in part), "")
        content.append(part if kind == "text" else {"type": kind, kind: Path(source)})
    return [{"role": "user", "content": content}]


def engine_ids(ours: Pipeline, messages: list[dict], count: int) -> tuple[list[int], list[int]]:
    prompt = ours.prepare(ours.request(typed(messages))).prompt
    items: queue.SimpleQueue = queue.SimpleQueue()
    ours.backend.submit(prompt, SamplingParams(max_tokens=count), items.put)
    ids: list[int] = []
    while True:
        token = items.get(timeout=60)
        assert not isinstance(token, BackendError)
        ids.append(token.id)
        if token.finish:
            return list(prompt.token_ids), ids


@PROMPTS
def test_greedy_ids_are_the_engines(directory, processor, model, engine, messages) -> None:
    batch = inputs(processor, messages)
    prompt, expected = engine_ids(engine, messages, 24)
    assert batch["input_ids"][0].tolist() == prompt
    made = model.generate(**batch, max_new_tokens=24, do_sample=False)
    assert made[0, len(prompt) :].tolist() == expected


def test_left_padding_changes_nothing(processor, model, directory) -> None:
    batch = inputs(processor, [TEXT, MIXED, IMAGE])
    assert batch["attention_mask"].sum(1).tolist() == [
        inputs(processor, messages)["input_ids"].shape[1] for messages in (TEXT, MIXED, IMAGE)
    ]
    assert batch["attention_mask"][0, 0] == 0
    assert batch["attention_mask"][:, -1].tolist() == [1, 1, 1]
    together = model.generate(**batch, max_new_tokens=12, do_sample=False)[:, -12:]
    stop = set(model.generation_config.eos_token_id)
    for row, messages in zip(together.tolist(), (TEXT, MIXED, IMAGE), strict=True):
        single = inputs(processor, messages)
        alone = model.generate(**single, max_new_tokens=12, do_sample=False)
        alone = alone[0, single["input_ids"].shape[1] :].tolist()
        assert row[: len(alone)] == alone
        assert len(alone) == 12 or alone[-1] in stop


def test_padding_on_the_right_gives_the_same_logits(processor, model) -> None:
    left = inputs(processor, [TEXT, IMAGE])
    right = inputs(processor, [TEXT, IMAGE], padding_side="right")
    a, b = model(**left).logits, model(**right).logits
    for row in range(2):
        assert torch.equal(
            a[row][left["attention_mask"][row].bool()], b[row][right["attention_mask"][row].bool()]
        )
    assert not a[0][left["attention_mask"][0] == 0].any()


def test_a_cache_continues_where_it_stopped(processor, model) -> None:
    ids = inputs(processor, IMAGE)
    whole = model(**ids).logits[0]
    cut = ids["input_ids"].shape[1] - 5
    head = {**ids, "input_ids": ids["input_ids"][:, :cut], "attention_mask": None}
    first = model(**head)
    assert first.cache.get_seq_length() == cut
    rest = model(input_ids=ids["input_ids"][:, cut:], cache=first.cache)
    near = {"rtol": 0, "atol": 2e-3}  # other heights of products; the logits spread over +-5
    torch.testing.assert_close(first.logits[0], whole[:cut], **near)
    torch.testing.assert_close(rest.logits[0], whole[cut:], **near)
    assert rest.cache.get_seq_length() == cut + 5


def test_a_cache_grows_and_is_used_again(processor, model, monkeypatch) -> None:
    monkeypatch.setattr("k3vl.hf.cache._FIRST_UNITS", 0)  # every page but the first must be made
    ids = inputs(processor, MIXED)
    made = model(**ids)
    units = made.cache.hybrid.sizes.num_units
    monkeypatch.undo()
    roomy = model(**ids)
    assert units < roomy.cache.hybrid.sizes.num_units
    assert torch.equal(made.logits, roomy.logits)
    made.cache.reset()
    assert made.cache.get_seq_length() == 0
    assert torch.equal(model(**ids, cache=made.cache).logits, roomy.logits)
    assert made.cache.hybrid.sizes.num_units == units


def test_sequences_of_a_cache_are_copied_and_selected(processor, model) -> None:
    cache = model(**inputs(processor, [TEXT, IMAGE])).cache
    cache.batch_repeat_interleave(2)  # both copies of a sequence must go their own way
    sequences = list(zip((TEXT, TEXT, IMAGE, IMAGE), (5, 6, 7, 8), strict=True))
    chosen = [3, 0]
    steps = torch.tensor([[token] for _, token in sequences])
    four = model(input_ids=steps, cache=cache).logits
    cache.batch_select_indices(torch.tensor(chosen))
    two = model(input_ids=torch.tensor([[9], [9]]), cache=cache).logits
    for row, (messages, token) in enumerate(sequences):
        own = model(**inputs(processor, messages)).cache
        alone = model(input_ids=torch.tensor([[token]]), cache=own).logits[0]
        torch.testing.assert_close(alone, four[row], rtol=0, atol=2e-3)
        if row in chosen:
            alone = model(input_ids=torch.tensor([[9]]), cache=own).logits[0]
            torch.testing.assert_close(alone, two[chosen.index(row)], rtol=0, atol=2e-3)


def test_logits_to_keep(processor, model) -> None:
    ids = inputs(processor, TEXT)
    whole = model(**ids).logits
    assert torch.allclose(model(**ids, logits_to_keep=3).logits, whole[:, -3:], atol=1e-5)
    some = torch.tensor([4, 0])
    assert torch.allclose(model(**ids, logits_to_keep=some).logits, whole[:, some], atol=1e-5)


def test_without_a_cache_the_same_answer(processor, model) -> None:
    batch = inputs(processor, TEXT)
    with_cache = model.generate(**batch, max_new_tokens=5, do_sample=False)
    without = model.generate(**batch, max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)


def test_sampling_is_seeded(processor, model) -> None:
    batch = inputs(processor, TEXT)

    def draw(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        settings = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3}
        return model.generate(**batch, max_new_tokens=8, **settings).tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len({tuple(row) for row in draw(1)}) == 3


def test_several_answers_see_their_own_pictures(processor, model) -> None:
    pictures = [{"type": "image", "path": str(path)} for path in (SIGN, SHAPES)]
    other = ask("What is in the pictures?", *pictures)
    batch = inputs(processor, [IMAGE, other])
    settings = {"max_new_tokens": 8, "do_sample": False}
    once = model.generate(**batch, **settings)
    beams = model.generate(**batch, **settings, num_beams=2, num_return_sequences=2)
    assert beams.shape[0] == 4
    for index, messages in enumerate((IMAGE, other)):
        alone = inputs(processor, messages)
        found = model.generate(**alone, **settings, num_beams=2, num_return_sequences=2)
        length = alone["input_ids"].shape[1]
        wide = batch["input_ids"].shape[1]
        for k in range(2):
            got = beams[2 * index + k, wide:].tolist()
            expected = found[k, length:].tolist()
            assert got[: len(expected)] == expected
    likeliest = {"max_new_tokens": 8, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    assert torch.equal(model.generate(**batch, **likeliest), once.repeat_interleave(2, dim=0))


def test_a_streamer_hears_every_piece(processor, model, directory) -> None:
    batch = inputs(processor, IMAGE)
    streamer = TextIteratorStreamer(
        processor.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60
    )
    made = model.generate(**batch, max_new_tokens=20, do_sample=False, streamer=streamer)
    new = made[0, batch["input_ids"].shape[1] :]
    assert "".join(streamer) == processor.decode(new, skip_special_tokens=True)


def test_config_is_ours(directory) -> None:
    config = AutoConfig.from_pretrained(directory)
    assert isinstance(config, k3vl.hf.KimiK3Config)
    assert config.parse() == load_config(directory)


def test_saved_and_loaded_again(processor, model, tmp_path) -> None:
    processor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert again.config.parse().quantized_format is None
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    reader = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(reader, k3vl.hf.KimiK3Processor)
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path), k3vl.hf.KimiK3Tokenizer)
    assert reader.media.config == processor.media.config
    assert reader.defaults == processor.defaults
    batch = inputs(reader, MIXED)
    assert torch.equal(batch["input_ids"], inputs(processor, MIXED)["input_ids"])
    assert torch.equal(model(**batch).logits, again(**batch).logits)
    with Pipeline.load(tmp_path) as ours:
        assert engine_ids(ours, TEXT, 2)[0] == inputs(processor, TEXT)["input_ids"][0].tolist()


def test_bfloat16_weights(directory, processor) -> None:
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    batch = inputs(processor, IMAGE)
    assert model.generate(**batch, max_new_tokens=3, do_sample=False).shape[1] > 80


def test_media_must_have_their_pads(processor, model) -> None:
    batch = inputs(processor, IMAGE)
    batch["image_grid_thw"] = batch["image_grid_thw"].flip(0).repeat(2, 1)
    batch["pixel_values"] = batch["pixel_values"].repeat(2, 1, 1, 1)
    with pytest.raises(ShapeError, match="1 media items have no pads"):
        model(**batch)


def test_what_is_not_supported_is_refused(directory, model, processor, tmp_path) -> None:
    with pytest.raises(ConfigError, match="load_in_8bit"):
        AutoModelForImageTextToText.from_pretrained(directory, load_in_8bit=True)
    with pytest.raises(ConfigError, match="no such directory"):
        k3vl.hf.KimiK3ForConditionalGeneration.from_pretrained(tmp_path / "none")
    with pytest.raises(ConfigError, match="cache_implementation static"):
        model.generate(**inputs(processor, TEXT), max_new_tokens=2, cache_implementation="static")
    ids = inputs(processor, TEXT)
    with pytest.raises(ConfigError, match="labels: not supported"):
        model(**ids, labels=ids["input_ids"])
    with pytest.raises(ConfigError, match="not a DynamicCache"):
        model(**ids, cache=DynamicCache())
    with pytest.raises(ShapeError, match="the cache has 1 sequences, the input 2"):
        model(input_ids=ids["input_ids"].repeat(2, 1), cache=model(**ids).cache)
    with pytest.raises(ConfigError, match="min_pixels: not supported"):
        AutoProcessor.from_pretrained(directory, min_pixels=4)
    with pytest.raises(NotImplementedError, match="cropped"):
        model(**inputs(processor, TEXT)).cache.crop(1)


def test_the_pipeline_answers() -> None:
    answering = pipeline("image-text-to-text", model=str(DEMO_CHECKPOINT), device="cpu")
    (made,) = answering(text=IMAGE, return_full_text=False, generate_kwargs={"do_sample": False})
    assert made["generated_text"] == "A red circle and a blue star."
    (talk,) = answering(text=IMAGE)
    assert talk["generated_text"][-1] == {
        "role": "assistant",
        "content": "A red circle and a blue star.",
    }
    begun = [*IMAGE, {"role": "assistant", "content": [{"type": "text", "text": "A red"}]}]
    (rest,) = answering(text=begun, return_full_text=False)
    assert rest["generated_text"] == " circle and a blue star."
    other = ask("What is in the picture?", {"type": "image", "path": str(SIGN)})
    both = answering(text=[IMAGE, other], return_full_text=False)
    assert [len(made) for made in both] == [1, 1]
    assert both[0][0]["generated_text"] == "A red circle and a blue star."
