"""Data files become arrays: text and its tokenizer, JSONL, token files, images. I/O.

Every reader raises `DataError`, one line, with the file and what is wrong in it.
"""

import json
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from .errors import DataError

Array = NDArray[Any]


class Tokenizer(Protocol):
    vocab_size: int
    """One more than the largest token."""

    def encode(self, text: str) -> Array: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class Bytes:
    """A token is a byte of the text in UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> Array:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """A `tokenizers` JSON file."""

    def __init__(self, path: str) -> None:
        import tokenizers

        if not Path(path).is_file():
            raise DataError(f"{path}: there is no such tokenizer file; check [data] tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{path}: not a tokenizer.json of the tokenizers library: {reason}") from None
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> Array:
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        pieces = list(_pieces(text))
        found = [np.empty(0, dtype)]
        # An encoding is about a hundred bytes a token, so few of them live at a time.
        for first in range(0, len(pieces), 64):
            for encoding in self._tokenizer.encode_batch(pieces[first : first + 64], add_special_tokens=False):
                found.append(np.array(encoding.ids, dtype))
        return np.concatenate(found)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def _pieces(text: str, size: int = 2**16) -> Iterator[str]:
    """The text in pieces of about `size` characters that end where a line ends."""
    first = 0
    while first < len(text):
        newline = text.find("\n", first + size)
        end = newline + 1 if newline >= 0 else len(text)
        yield text[first:end]
        first = end


def open_tokenizer(path: str | None) -> Tokenizer:
    return FileTokenizer(path) if path else Bytes()


def embedded_text() -> str:
    """The documentation of Python's syntax and types that every Python carries for `help()`: half a megabyte
    of English and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def expand(paths: Sequence[str]) -> list[Path]:
    """The files that paths and patterns name, patterns in sorted order."""
    found: list[Path] = []
    for path in paths:
        files = sorted(glob(path, recursive=True)) if has_magic(path) and not Path(path).exists() else [path]
        if not files:
            raise DataError(f"{path}: no file is called so; check [data] path")
        found.extend(map(Path, files))
    for path in found:
        if not path.is_file():
            raise DataError(f"{path}: there is no such file; check [data] path")
    return found


def read_texts(paths: Sequence[str]) -> list[str]:
    return [_read_text(path) for path in expand(paths)]


def read_records(paths: Sequence[str], fields: Sequence[str]) -> list[tuple[str, ...]]:
    """The texts under `fields` of every record: JSON, one a line, where blank lines are skipped; or a folder that
    `datasets` saved."""
    folders = [path for path in paths if Path(path).is_dir()]
    files = [path for path in paths if path not in folders]
    found = [texts for path in folders for texts in _saved_records(Path(path), fields)]
    return found + [texts for path in expand(files) for texts in _records(path, fields)]


def _saved_records(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    try:
        import datasets
    except ImportError:
        raise DataError(f'{path}: to read this folder, run `pip install "geotrain[datasets]"`') from None
    try:
        saved: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: not a folder that the datasets library saved: {reason}") from None
    if isinstance(saved, dict):
        raise DataError(f"{path} holds {', '.join(map(repr, saved))}; name the folder of one of them")
    for number, record in enumerate(saved, 1):
        yield tuple(_text_of(record, field, f"{path}: record {number}") for field in fields)


def _records(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    # Not splitlines: JSON strings may hold the Unicode line separators that it splits at.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON: {error}") from None
        yield tuple(_text_of(record, field, f"{path}: line {number}") for field in fields)


def _text_of(record: Any, field: str, where: str) -> str:
    if not isinstance(record, dict) or field not in record:
        known = f"; it has {', '.join(map(repr, list(record)[:8]))}" if isinstance(record, dict) else ""
        raise DataError(f"{where} has no {field!r}{known}; name the right key in [data]")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: {field!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write half of a surrogate pair, which is no character
        raise DataError(f"{where}: {field!r} holds half a surrogate pair; correct it") from None
    return text


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 at byte {error.start} (0x{error.object[error.start]:02x}); convert the file"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_tokens(paths: Sequence[str], dtype: str) -> list[Array]:
    """Memory-mapped tokens [N] of each file; `dtype` is that of files without a header."""
    return [_map_tokens(path, dtype) for path in expand(paths)]


def _map_tokens(path: Path, dtype: str) -> Array:
    if path.suffix == ".npy":
        tokens = _load(path, mmap_mode="r")
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            kind = f"{tokens.dtype}{list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "not an array"
            raise DataError(f"{path}: token files are uint16 or uint32 in one dimension, this is {kind}")
        return tokens
    size, item = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % item:
        raise DataError(f"{path}: {size} bytes are no whole number of {dtype} tokens; check [data] dtype")
    return np.memmap(path, np.dtype(dtype), mode="r")


def read_images(paths: Sequence[str]) -> tuple[Array, Array]:
    """Images [N, ...] and labels [N, ...]."""
    files = expand(paths)
    if len(files) == 1:
        archive = _load(files[0])
        if isinstance(archive, np.ndarray) or not {"images", "labels"} <= set(archive.files):
            raise DataError(f"{files[0]}: needs arrays called images and labels; save with numpy.savez")
        with archive, _plain_numbers(files[0]):
            images, labels = archive["images"], archive["labels"]
    elif len(files) == 2:
        images, labels = (_load(path, mmap_mode="r") for path in files)
    else:
        raise DataError(f"[data] path names {len(files)} files; give one .npz, or one .npy of images and one of labels")
    for what, array in (("images", images), ("labels", labels)):
        if not isinstance(array, np.ndarray) or array.ndim < 1 or array.dtype.kind not in "uif":
            raise DataError(f"{files[0]}: {what} are no array of numbers")
    if len(images) != len(labels):
        raise DataError(f"{files[0]}: {len(images)} images but {len(labels)} labels; there must be one each")
    return images, labels


def _load(path: Path, mmap_mode: Any = None) -> Any:
    with _plain_numbers(path):
        return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)


@contextmanager
def _plain_numbers(path: Path) -> Generator[None, None, None]:
    """What numpy raises over a file. An archive is read when an array is asked for, not when it is opened."""
    try:
        yield
    except (ValueError, OSError, EOFError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a numpy file of plain numbers: {' '.join(str(error).split())[:200]}") from None


class ChatStyle:
    """What stands round a prompt and a response.

    Args:
        template: text with {prompt} in it.
        end: what a response ends with.
    """

    def __init__(self, template: str, end: str) -> None:
        self._template, self.end = template, end

    def before(self, prompt: str) -> str:
        return self._template.replace("{prompt}", prompt)

    def after(self, prompt: str, response: str) -> str:
        return response + self.end


class _ChatTemplate(ChatStyle):
    """As a tokenizer of transformers writes a conversation."""

    def __init__(self, tokenizer: Any, end: str) -> None:
        super().__init__("", end)
        self._tokenizer = tokenizer

    def before(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def after(self, prompt: str, response: str) -> str:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text, before = self._tokenizer.apply_chat_template(messages, tokenize=False), self.before(prompt)
        return text.removeprefix(before) if text.startswith(before) else super().after(prompt, response)


def chat_style(folder: Path | None, template: str | None, end: str | None) -> ChatStyle:
    """The style of a Hugging Face folder's tokenizer, as far as `template` and `end` leave it open."""
    tokenizer: Any = None
    if folder is not None and (folder / "tokenizer_config.json").is_file() and (template is None or end is None):
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    eos: str | None = getattr(tokenizer, "eos_token", None)
    ending = end if end is not None else (eos or "\n")
    if template is None and getattr(tokenizer, "chat_template", None):
        return _ChatTemplate(tokenizer, ending)
    return ChatStyle(template or "{prompt}\n", ending)
