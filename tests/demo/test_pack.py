import json

import pytest
import torch

from k3vl.checkpoint_writer import save_checkpoint
from k3vl.config import load_config, load_media_config
from k3vl.demo import pack
from k3vl.demo.convert import to_k3
from k3vl.demo.train_model import DemoModel
from k3vl.types import MediaPart, Message, SamplingParams, TextPart
from tests.vision.files import noise


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(1)
    return to_k3(DemoModel(3).model_state())


@pytest.fixture(scope="module")
def shipped(tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    pack.write_shipped(folder, tensors)
    return folder


def test_shipped_directory_fits_into_24_mib(shipped):
    assert sum(file.stat().st_size for file in shipped.iterdir()) <= 24 * 2**20


def test_eight_bits_cost_at_most_half_a_step(shipped, tensors):
    back = pack.read_tensors(shipped)
    for name, value in tensors.items():
        if value.ndim < 2 or value.numel() < 4096:
            continue
        step = value.abs().max() / 127
        assert (back[name] - value).abs().max() <= 0.51 * step, name


def test_several_results_are_shipped_as_their_mean(shipped, tensors, tmp_path):
    folders = [tmp_path / name for name in ("as it is", "doubled", "target")]
    save_checkpoint(folders[0], pack.encode_bf16(tensors), json_files={})
    doubled = {name: 2 * value for name, value in tensors.items()}
    save_checkpoint(folders[1], pack.encode_bf16(doubled), json_files={})
    pack.main([str(folder) for folder in folders])
    back, one = pack.read_tensors(folders[2]), pack.read_tensors(shipped)
    for name, value in one.items():
        assert torch.allclose(back[name], 1.5 * value, atol=0.02 * value.abs().max()), name


def test_configuration_is_read_by_the_project(shipped):
    config = load_config(shipped)
    assert config.text.shared_intermediate_size == 384
    assert config.vision.head_dim == 64
    assert load_media_config(shipped).in_patch_limit == 1024


def test_committed_configuration_is_what_the_code_writes():
    for name, content in pack.json_files().items():
        assert json.loads((pack.CHECKPOINT / name).read_text("utf-8")) == content, name


def test_training_model_and_engine_say_the_same(tensors, tmp_path):
    """The training forward, teacher-forced on the engine's own greedy answer, agrees with it."""

    from k3vl.demo.convert import from_k3
    from k3vl.pipeline import Pipeline

    torch.compiler.set_stance("force_eager")
    folder = tmp_path / "plain"
    save_checkpoint(folder, dict(tensors), json_files=pack.json_files())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((pack.CHECKPOINT / name).read_bytes())
    picture = noise((84, 56), 80).convert("RGB")
    with Pipeline.load(folder) as pipeline:
        parts = (MediaPart("image", picture), TextPart("Describe this."))
        request = pipeline.request([Message(role="user", parts=parts)])
        prepared = pipeline.prepare(request)
        reply = pipeline.reply(request, sampling=SamplingParams(max_tokens=6))
        tokenizer = pipeline.tokenizer
    model = DemoModel(3).eval()
    model.load_state_dict(from_k3(tensors) | {"dense_head": model.dense_head.detach()})
    pixels = torch.tensor(list(picture.tobytes())).view(56, 84, 3).permute(2, 0, 1)[None] / 255
    ids = list(prepared.prompt.token_ids)
    (span,) = prepared.prompt.spans
    slots = span.offset + torch.arange(span.item.num_tokens)[None, None]
    said = []
    with torch.no_grad():
        features = model.see(pixels, (1,))
        for _ in range(6):
            hidden = model(torch.tensor([ids]), features, slots)
            ids.append(int(model.logits(hidden[-1:]).argmax()))
            said.append(ids[-1])
    text = b"".join(tokenizer.token_bytes(i) for i in said if not tokenizer.is_control(i))
    assert reply.content == text.decode(errors="replace")
