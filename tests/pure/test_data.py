"""Every sample once an epoch, the same for every split and replay; files that are wrong in one line."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.config import parse_job
from geotrain.corpus import Bytes, FileTokenizer, embedded_text
from geotrain.data import BatchSource, FunctionSource, SampledSource, Windows, count_tokens, open_source, permute
from geotrain.errors import DataError


def source_of(folder, text):
    return open_source(parse_job(text, "job.toml", folder))


def complaint(folder, text):
    with pytest.raises(DataError) as caught:
        source_of(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_permutations_are_permutations(size, seed, epoch):
    order = permute(np.arange(size), size, (seed, epoch))
    assert sorted(order) == list(range(size))
    some = np.array([0, size // 2, size - 1])
    assert (permute(some, size, (seed, epoch)) == order[some]).all()  # place by place, no state


def test_permutations_differ_by_key_and_have_no_pattern():
    size = 5000
    one, other = (permute(np.arange(size), size, (7, epoch)) for epoch in (1, 2))
    for order in (one, other):
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.06  # 4 standard deviations
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06
    assert (one == other).mean() < 0.005


def counting(samples, **options):
    return SampledSource(Windows([np.arange(samples, dtype=np.uint32)], 1, samples, shift=False), **options)


@given(st.integers(2, 60), st.integers(1, 4), st.integers(1, 7), st.sampled_from([0.0, 0.05, 0.3]), st.integers(0, 99))
def test_every_sample_once_an_epoch_and_the_held_out_never(samples, microbatches, size, held_out, seed):
    source = counting(samples, seed=seed, microbatches=microbatches, microbatch_size=size, held_out=held_out)
    aside = {int(t) for i in range(source.held_out_microbatches) for t in source.held_out(i)["tokens"]}
    trained = samples - len(aside)
    assert len(aside) == (max(1, round(samples * held_out)) if held_out else 0)
    seen = []
    step = 0
    while len(seen) < 2 * trained:
        seen += [int(t) for i in range(microbatches) for t in source.train(step, i)["tokens"]]
        step += 1
    for epoch in (seen[:trained], seen[trained : 2 * trained]):
        assert sorted(epoch) == sorted(set(range(samples)) - aside)


def test_microbatches_depend_on_numbers_alone(tmp_path):
    text = "[run]\nseed = {}"
    one, again, other = (source_of(tmp_path, text.format(seed)) for seed in (3, 3, 4))
    later = one.train(17, 5)
    one.train(0, 0)
    assert all(torch.equal(later[n], again.train(17, 5)[n]) for n in later)
    assert not torch.equal(later["tokens"], other.train(17, 5)["tokens"])
    assert all(torch.equal(one.held_out(2)["tokens"], s.held_out(2)["tokens"]) for s in (again, other))
    assert one.tokens_per_microbatch == later["tokens"].numel() and one.vocab_size == 256
    assert one.held_out_microbatches >= 8


def test_the_embedded_text_is_english_and_bytes_round_trip():
    text = embedded_text()
    assert len(text) > 300_000 and " the " in text
    assert Bytes().decode(Bytes().encode(text)) == text


@pytest.mark.parametrize(
    ("model", "names", "shifted"),
    [
        ("", ["tokens", "labels"], True),
        ("kind = 'hf'\npath = 'm'\n", ["input_ids", "labels"], False),
        ("kind = 'factory'\nfactory = 'm.py:f'\n", ["tokens", "labels"], True),
    ],
)
def test_names_and_shift_follow_the_model(tmp_path, model, names, shifted):
    (tmp_path / "a.txt").write_text("abcdefghij" * 20)
    batch = source_of(tmp_path, f"[model]\n{model}context = 10\n[data]\nkind = 'text'\npath = 'a.txt'").train(0, 0)
    assert list(batch) == names
    tokens, labels = batch.values()
    assert tokens.dtype == labels.dtype == torch.int64 and tokens.shape == labels.shape == (2, 10)
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) if shifted else torch.equal(tokens, labels)


def test_names_and_shift_can_be_said(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 20)
    data = "[data]\nkind = 'text'\npath = 'a.txt'\nnames = ['x', 'y']\nshift = false"
    batch = source_of(tmp_path, f"[model]\ncontext = 10\n{data}").train(0, 0)
    assert list(batch) == ["x", "y"] and torch.equal(batch["x"], batch["y"])


def all_text(source):
    """The windows of the training data of one epoch, in the order of the text."""
    return sorted(
        bytes(row.tolist()).decode() for k in range(40) for i in range(8) for row in source.train(k, i)["tokens"]
    )


def test_several_texts_patterns_and_line_ends(tmp_path):
    (tmp_path / "1.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "2.txt").write_text("two\n")
    data = "[data]\nkind = 'text'\npath = '*.txt'\nseparator = '+'\nheld_out = 0\nshift = false"
    source = source_of(tmp_path, f"[model]\ncontext = 9\n{data}")
    assert set(all_text(source)) == {"one\n+two\n"}


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "ab\\u2028"}\n\n{"body": "cd"}\n')
    job = "[model]\ncontext = 8\n[data]\nkind = 'jsonl'\npath = 'a.jsonl'\nfield = 'body'\nheld_out = 0\nshift = false"
    job += "\nseparator = '-'"
    assert set(all_text(source_of(tmp_path, job))) == {"ab\u2028-cd"}
    for text, expected in [
        ('{"body": "x"}\n{', "line 2 is not JSON"),
        ('{"text": "x"}', "line 1 has no 'body'; it has 'text'; name the right key in [data]"),
        ("[1]", "line 1 has no 'body'; name the right key in [data]"),
        ('{"body": 3}', "line 1: 'body' is int, not text"),
        ("", "the text is empty"),
    ]:
        path.write_text(text)
        assert expected in complaint(tmp_path, job)


def test_text_complaints(tmp_path):
    job = "[model]\ncontext = 10\n[data]\nkind = 'text'\npath = 'a.txt'"
    assert "there is no such file" in complaint(tmp_path, job)
    assert "no file is called so" in complaint(tmp_path, job.replace("a.txt", "*.md"))
    for content, expected in [
        (b"", "the text is empty"),
        (b" \n", "the text is empty"),
        (b"abc\xff", "not UTF-8 at byte 3 (0xff)"),
        (b"abc", "has 3 tokens and one sample takes 11"),
        (b"a" * 11, "too few to hold one out"),
    ]:
        (tmp_path / "a.txt").write_bytes(content)
        assert expected in complaint(tmp_path, job)


@pytest.mark.parametrize("name", ["t.npy", "t.bin"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files(tmp_path, name, dtype):
    tokens = np.arange(1000, dtype=dtype)
    if name.endswith("npy"):
        np.save(tmp_path / name, tokens)
    else:
        tokens.tofile(tmp_path / name)
    job = f"[model]\ncontext = 9\n[data]\nkind = 'tokens'\npath = '{name}'\ndtype = '{dtype}'\nvocab = 1000"
    source = source_of(tmp_path, job)
    batch = source.train(3, 1)
    assert torch.equal(batch["labels"], batch["tokens"] + 1) and (batch["tokens"][:, 0] % 10 == 0).all()
    assert source.vocab_size == 1000 and source.tokenizer is None


def test_token_files_are_mapped_and_windows_stay_in_one(tmp_path):
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.full(25, i, np.uint16))
    streams = [np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(3)]
    windows = Windows(streams, 9, 3)
    assert len(windows) == 6
    assert windows.batch(np.arange(6))["tokens"].tolist() == [[i // 2] * 9 for i in range(6)]


def test_token_complaints(tmp_path):
    job = "[model]\ncontext = 4\n[data]\nkind = 'tokens'\npath = '{}'\nvocab = 10"
    np.save(tmp_path / "big.npy", np.full(100, 10, np.uint16))
    np.save(tmp_path / "signed.npy", np.zeros(100, np.int64))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "text.npy").write_text("hello")
    assert "token 10 is outside of a vocabulary of 10" in complaint(tmp_path, job.format("big.npy"))
    assert "this is int64[100]" in complaint(tmp_path, job.format("signed.npy"))
    for name in ("object.npy", "text.npy"):
        assert "not a numpy file of plain numbers" in complaint(tmp_path, job.format(name))
    for name in ("odd.bin", "empty.bin"):
        assert "no whole number of uint16 tokens" in complaint(tmp_path, job.format(name))


def test_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4), dtype=np.uint8)
    labels = images[:, 0, 0, 0].astype(np.int32)
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    np.save(tmp_path / "i.npy", images)
    np.save(tmp_path / "l.npy", labels)
    model = "[model]\nkind = 'factory'\nfactory = 'm.py:f'\n"
    sources = [
        source_of(tmp_path, f"{model}[data]\nkind = 'images'\npath = {path}")
        for path in ("'a.npz'", "['i.npy', 'l.npy']")
    ]
    batch, same = (s.train(1, 2) for s in sources)
    assert batch["images"].dtype == torch.float32 and batch["images"].shape == (2, 1, 4, 4)
    assert batch["labels"].dtype == torch.int64
    assert torch.equal((batch["images"][:, 0, 0, 0] * 255).round().long(), batch["labels"])
    assert all(torch.equal(batch[n], same[n]) for n in batch)
    assert sources[0].vocab_size is None and sources[0].tokens_per_microbatch == 2


def test_image_complaints(tmp_path):
    job = "[model]\nkind = 'factory'\nfactory = 'm.py:f'\n[data]\nkind = 'images'\npath = {}"
    np.savez(tmp_path / "short.npz", images=np.zeros((4, 2)), labels=np.zeros(3, int))
    np.savez(tmp_path / "names.npz", x=np.zeros(4))
    np.savez(tmp_path / "none.npz", images=np.zeros((0, 2)), labels=np.zeros(0, int))
    np.savez(tmp_path / "words.npz", images=np.array(["a"]), labels=np.zeros(1, int))
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04nothing")
    for path, expected in [
        ("'short.npz'", "4 images but 3 labels"),
        ("'names.npz'", "needs arrays called images and labels"),
        ("'none.npz'", "no images"),
        ("'words.npz'", "images are no array of numbers"),
        ("'bad.npz'", "not a numpy file"),
        ("['short.npz', 'short.npz', 'short.npz']", "names 3 files"),
    ]:
        assert expected in complaint(tmp_path, job.format(path))


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"a": 0, "b": 1, "<end>": 7, "[UNK]": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_file(tokenizer):
    found = FileTokenizer(str(tokenizer / "tokenizer.json"))
    assert found.vocab_size == 8  # ids may have gaps
    assert found.encode("a b\nb ? a").tolist() == [0, 1, 1, 3, 0] and found.decode([0, 1]) == "ab"
    long = "a b b\n" * 50_000  # more than one piece
    assert found.encode(long).tolist() == [0, 1, 1] * 50_000
    (tokenizer / "a.txt").write_text("a b b " * 20)
    job = "[model]\ncontext = 4\n[data]\nkind = 'text'\npath = 'a.txt'\ntokenizer = '{}'"
    source = source_of(tokenizer, job.format("tokenizer.json"))
    assert source.vocab_size == 8 and source.train(0, 0)["tokens"].max() == 1
    (tokenizer / "bad.json").write_text(json.dumps({"version": "1.0"}))
    assert "not a tokenizer.json" in complaint(tokenizer, job.format("bad.json"))
    assert "no such tokenizer file" in complaint(tokenizer, job.format("none.json"))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_batches_in_memory_are_cut_in_order(microbatches, size, count):
    batches = [torch.arange(microbatches * size * 2).view(-1, 2) + 100 * i for i in range(count)]
    source = BatchSource(
        [(b, b[:, 0].float()) for b in batches],
        microbatches,
        ["x", "y"],
        [{"x": batches[0], "y": batches[0][:, 0].float()}],
    )
    for step in range(2 * count):
        parts = [source.train(step, i) for i in range(microbatches)]
        assert torch.equal(torch.cat([p["x"] for p in parts]), batches[step % count])
        assert torch.equal(torch.cat([p["y"] for p in parts]), batches[step % count][:, 0].float())
    assert source.held_out_microbatches == microbatches and source.tokens_per_microbatch == size * 2
    assert torch.equal(source.held_out(microbatches)["x"], source.held_out(0)["x"])


def test_batch_complaints():
    x = torch.zeros(6, 2)
    for make, expected in [
        (lambda: BatchSource([], 2), "there are no batches"),
        (lambda: BatchSource([x], 4, ["x"]), "cannot be cut into 4 equal microbatches"),
        (lambda: BatchSource([x, x[:4]], 2, ["x"]), r"batch 1 is x float32\[4, 2\], the first is x float32\[6, 2\]"),
        (lambda: BatchSource([(x, x)], 2, ["x"]), "2 tensors and 1 names"),
        (lambda: BatchSource([{"x": 3}], 2), "x of a batch is int, not a tensor"),
        (lambda: BatchSource([x], 2, ["x"]).held_out(0), "no held-out batches"),
    ]:
        with pytest.raises(DataError, match=expected):
            make()


def test_a_function_is_a_source():
    source = FunctionSource(lambda step, microbatch: {"tokens": torch.full((2, 3), step * 10 + microbatch)})
    assert source.train(4, 1)["tokens"].eq(41).all() and source.tokens_per_microbatch == 6
    assert count_tokens({"images": torch.zeros(5, 1, 2, 2)}) == 5
    with pytest.raises(DataError):
        source.held_out(0)
