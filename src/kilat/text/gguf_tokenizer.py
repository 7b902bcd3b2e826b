"""The tokenizer that a GGUF file's metadata describes, rebuilt as a pipeline of the ``tokenizers`` library.

Two families: ``gpt2`` (byte-level BPE; ``tokenizer.ggml.pre`` names the regular expressions that cut the text first) and ``llama``
(SentencePiece BPE with scores and byte tokens). The metadata is not trusted.
Sources: llama.cpp's src/llama-vocab.cpp for what the names mean, the models' own tokenizer.json for the pipelines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from kilat.base.errors import ModelFileError
from kilat.text.pipeline import Built, wrap
from kilat.text.spelling import SPACE, Spelling

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True)
class Cut:
    """How a byte-level vocabulary wants text cut before its merges.

    ``splits`` are regular expressions applied one after the other, each match becoming a piece. ``whole_words``: a piece that is a
    token is that token, whatever the merges say. ``bos``: BOS begins a text unless the file says otherwise.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_LLAMA3 = Cut((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_TAIL}",), whole_words=True, bos=True)

CUTS: Final = MappingProxyType(
    {
        "gpt-2": Cut((_GPT2_SPLIT,)),
        "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "smollm": Cut((r"\p{N}", _GPT2_SPLIT)),
        "qwen2": Cut((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_TAIL}",), nfc=True),
        "llama-bpe": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama3": _LLAMA3,
        "tekken": Cut(
            (
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
                rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
            ),
            whole_words=True,
            bos=True,
        ),
    }
)
"""``tokenizer.ggml.pre`` -> how to cut. A name that is not here is refused: another cut would quietly give other ids."""


def build(metadata: Mapping[str, object]) -> Built:
    """Pipeline of a GGUF file's ``metadata``; raises ModelFileError for a kind or ``pre`` that is not known, or damaged lists."""
    model = metadata.get("tokenizer.ggml.model")
    vocab = _Vocabulary(metadata)
    if model == "gpt2":
        pipeline, spelling, bos = _byte_level(metadata, vocab)
    elif model == "llama":
        pipeline, spelling, bos = _sentencepiece(metadata, vocab)
    else:
        raise ModelFileError(f"tokenizer.ggml.model is {model!r}, supported are 'gpt2' and 'llama'")
    _add_tokens(pipeline, vocab)
    bos_id, eos_id = vocab.id_at("bos_token_id"), vocab.id_at("eos_token_id")
    wrap(
        pipeline,
        bos_id=bos_id if _flag(metadata, "add_bos_token", bos) else None,
        eos_id=eos_id if _flag(metadata, "add_eos_token", False) else None,
    )
    return Built(pipeline, spelling, bos_id, eos_id)


class _Vocabulary:
    """The token list and its types, checked: strings, no two alike, one type each."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.metadata = metadata
        self.tokens: list[str] = _items(metadata, "tokens", str)
        if not self.tokens:
            raise ModelFileError("tokenizer.ggml.tokens is missing or empty: the file holds no tokenizer")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise ModelFileError(f"tokenizer.ggml.tokens lists {twice!r:.100} twice: the file is damaged")
        self.types: list[int] = _items(metadata, "token_type", int) or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ModelFileError(
                f"tokenizer.ggml.token_type has {len(self.types)} entries for {len(self.tokens)} tokens: the file is damaged"
            )

    def id_at(self, name: str) -> int | None:
        """The token id that ``tokenizer.ggml.<name>`` holds."""
        found = self.metadata.get(f"tokenizer.ggml.{name}")
        if found is not None and (not isinstance(found, int) or not 0 <= found < len(self.tokens)):
            raise ModelFileError(
                f"tokenizer.ggml.{name} is {found!r:.50}, allowed 0 to {len(self.tokens) - 1}: the file is damaged"
            )
        return found


def _byte_level(metadata: Mapping[str, object], vocab: _Vocabulary) -> tuple[Pipeline, Spelling, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    cut = CUTS.get(pre) if isinstance(pre, str) else None
    if cut is None:
        raise ModelFileError(
            f"tokenizer.ggml.pre is {pre!r:.100}, known are {', '.join(CUTS)}: another way of cutting text would give other "
            "token ids, so none is guessed; use a newer conversion of the model, or its Hugging Face directory"
        )
    merges = []
    for merge in _items(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocab.ids or right not in vocab.ids or left + right not in vocab.ids:
            raise ModelFileError(
                f"tokenizer.ggml.merges has {merge!r:.100}, which does not join two tokens: the file is damaged"
            )
        merges.append((left, right))
    pipeline = Pipeline(models.BPE(vocab=vocab.ids, merges=merges, ignore_merges=cut.whole_words))
    if cut.nfc:
        pipeline.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in cut.splits]
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    return pipeline, Spelling(byte_level=True), cut.bos


def _sentencepiece(metadata: Mapping[str, object], vocab: _Vocabulary) -> tuple[Pipeline, Spelling, bool]:
    scores = _items(metadata, "scores", float)
    if len(scores) != len(vocab.tokens):
        raise ModelFileError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocab.tokens)} tokens: the file is damaged"
        )
    unknown = vocab.id_at("unknown_token_id")
    pipeline = Pipeline(
        models.BPE(
            vocab=vocab.ids,
            merges=_merges(vocab, scores),
            unk_token=None if unknown is None else vocab.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _flag(metadata, "add_space_prefix", True)
    # as in Llama 2's tokenizer.json: every piece of text between special tokens gets its own leading space
    replace = normalizers.Replace(" ", SPACE)
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return pipeline, Spelling(byte_level=False, byte_fallback=True, strip_space=prefix), True


def _merges(vocab: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint token has the best score; as ranked pairs, that is every way to cut every
    token into two tokens, best token first (ties: the lower id)."""
    plain = {t for t, kind in zip(vocab.tokens, vocab.types) if kind in (_NORMAL, _USER_DEFINED)}
    longest = max(map(len, plain), default=0)
    if longest > 1024:
        raise ModelFileError(
            f"tokenizer.ggml.tokens has a token of {longest} characters, limit 1024: the file is damaged"
        )
    best_first = sorted(plain, key=lambda token: (-scores[vocab.ids[token]], vocab.ids[token]))
    return [
        (token[:at], token[at:])
        for token in best_first
        for at in range(1, len(token))
        if token[:at] in plain and token[at:] in plain
    ]


def _add_tokens(pipeline: Pipeline, vocab: _Vocabulary) -> None:
    """Tokens that are matched whole in the text: control tokens are special, user-defined ones are not."""
    special, plain = [], []
    for token, kind in zip(vocab.tokens, vocab.types):
        if kind in (_CONTROL, _UNKNOWN) and token:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and token:
            plain.append(AddedToken(token, special=False, normalized=False))
    pipeline.add_special_tokens(special)
    pipeline.add_tokens(plain)


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    found = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(found, bool):
        raise ModelFileError(
            f"tokenizer.ggml.{name} is {found!r:.50}, wanted true or false: the file is damaged"
        )
    return found


def _items(metadata: Mapping[str, object], name: str, kind: type) -> list[Any]:
    """The list ``tokenizer.ggml.<name>``, or an empty list; every item must be a ``kind``."""
    found = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(found, list) or not all(type(item) is kind for item in found):
        raise ModelFileError(f"tokenizer.ggml.{name} is not a list of {kind.__name__}: the file is damaged")
    return found
