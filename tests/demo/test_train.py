import json
import math

import pytest
import torch
import torch.multiprocessing

from k3vl.demo import train
from k3vl.demo.batches import BatchMaker
from k3vl.demo.buckets import BUCKETS
from k3vl.demo.chat import Chat
from k3vl.demo.feed import to_device
from k3vl.demo.muon import Muon, orthogonal
from k3vl.demo.pack import CHECKPOINT
from k3vl.demo.ranks import Ranks
from k3vl.demo.words import Printer, find_fonts


@pytest.fixture(autouse=True)
def _eager():
    torch.set_num_threads(1)
    yield
    torch.compiler.set_stance("default")


def _run(atlas_folder, out, *more):
    arguments = ["--atlas", str(atlas_folder), "--out", str(out), "--seconds", "300", "--size", "1"]
    train.main([*arguments, "--workers", "1", "--steps", "2", "--check", "0", *more])
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def test_a_run_can_be_continued(atlas_folder, tmp_path):
    first = _run(atlas_folder, tmp_path / "one")
    assert {line["bucket"] for line in first if "bucket" in line} <= {"img112", "img84"}
    assert not (tmp_path / "one" / "config.json").exists()
    second = _run(atlas_folder, tmp_path / "two", "--init", str(tmp_path / "one"))
    assert second[-1] == {"seconds": second[-1]["seconds"], "saved": str(tmp_path / "two")}
    files = sorted((tmp_path / "two").iterdir())
    assert len(files) <= 8
    assert max(file.stat().st_size for file in files) < 16 * 2**20


def test_a_run_that_was_cut_off_goes_on_from_what_it_saved(atlas_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_LOG_EVERY", 1)  # states are saved where losses are logged
    _run(atlas_folder, tmp_path / "cut", "--save-every", "0", "--steps", "1")
    saved = tmp_path / "cut" / "step-1"
    again = _run(atlas_folder, tmp_path / "on", "--init", str(saved), "--steps", "1")
    assert again[-1]["saved"] == str(tmp_path / "on")


@pytest.mark.parametrize("name", ["chat112x2", "chatclip2"])
def test_chats_train_and_every_answer_counts(atlas, atlas_folder, tmp_path, name):
    torch.compiler.set_stance("force_eager")
    args = train.parser().parse_args(["--atlas", str(atlas_folder), "--out", str(tmp_path)])
    trainer = train.Trainer(train.options_of(args), atlas, Ranks())
    bucket = next(bucket for bucket in BUCKETS if bucket.name == name)
    fonts = find_fonts(atlas_folder)
    batch = BatchMaker(atlas, Chat(CHECKPOINT / "tokenizer.json"), 5, fonts).batch(bucket, 1)
    on_device = to_device(batch, Printer(fonts), torch.device("cpu"))
    answers, labels, _ = trainer._losses(on_device)
    assert torch.isfinite(answers + labels)
    (gradient,) = torch.autograd.grad(answers, trainer.model.vision.patch)
    assert gradient.abs().sum() > 0
    assert set(batch.turn.tolist()) == set(range(len(batch.rows[0].turns)))


def test_two_processes_train_one_model(atlas_folder, tmp_path):
    lines = _run(atlas_folder, tmp_path, "--ranks", "2")
    (end,) = [line for line in lines if "samples" in line and "steps" in line]
    assert end["steps"] == 2
    assert end["samples"] == 4, "one sample of each process in a step"


def _averaged(index, meeting, out):
    ranks = Ranks(index, 2)
    ranks.join(meeting)
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.fill_(index)
        layer.bias.fill_(index)
    layer(torch.full((1, 3), 1.0 + index)).sum().backward()
    load = torch.tensor([float(index)])
    ranks.average(list(layer.parameters()), [load])
    told = ranks.agree(5.0 + index)
    ranks.align(list(layer.parameters()))
    gradients = [p.grad.clone() for p in layer.parameters()]
    torch.save([gradients, load, told, layer.weight.detach()], out / f"{index}.pt")
    ranks.leave()


def test_gradients_are_averaged_and_decisions_shared(tmp_path):
    torch.multiprocessing.spawn(_averaged, (tmp_path / "meeting", tmp_path), 2)
    for index in range(2):
        gradients, load, told, weight = torch.load(tmp_path / f"{index}.pt")
        assert gradients[0].tolist() == [[1.5] * 3] * 2
        assert gradients[1].tolist() == [1.0, 1.0]
        assert load.tolist() == [0.5]
        assert told == 5.0
        assert weight.abs().sum() == 0, "the first process's values"


def test_orthogonal_keeps_directions_and_evens_lengths():
    torch.manual_seed(0)
    matrix = torch.randn(2, 24, 16) * torch.logspace(0, -1, 16)
    singular = torch.linalg.svdvals(orthogonal(matrix))
    assert singular.min() > 0.5
    assert singular.max() < 1.4


def test_muon_walks_downhill():
    torch.manual_seed(0)
    target = torch.randn(3, 8, 8)
    weight = torch.nn.Parameter(torch.zeros(3, 8, 8))
    optimiser = Muon([weight], decay=0.0)
    losses = []
    for _ in range(60):
        loss = (weight - target).pow(2).mean()
        weight.grad = None
        loss.backward()
        optimiser.step(0.1)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert math.isfinite(losses[-1])
