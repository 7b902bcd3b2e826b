"""What a model's files are made into: a pipeline of the ``tokenizers`` library and what it does not say by itself."""

from dataclasses import dataclass

from tokenizers import Tokenizer as Pipeline
from tokenizers.processors import TemplateProcessing

from kilat.text.spelling import Spelling


@dataclass(frozen=True)
class Built:
    """A text-to-ids pipeline, the spelling of its vocabulary, and the ids that begin and end a text (None: there is none)."""

    pipeline: Pipeline
    spelling: Spelling
    bos_id: int | None
    eos_id: int | None


def wrap(pipeline: Pipeline, *, bos_id: int | None, eos_id: int | None) -> None:
    """Let ``pipeline`` put these ids (None: nothing) around a text when it is asked to add special tokens."""
    around = {"bos": bos_id, "eos": eos_id}
    given = {name: i for name, i in around.items() if i is not None}
    single = ["bos:0"] * ("bos" in given) + ["$A:0"] + ["eos:0"] * ("eos" in given)
    pipeline.post_processor = TemplateProcessing(
        single=single,
        pair=[*single, "$B:0"],
        special_tokens=[
            {"id": name, "ids": [i], "tokens": [pipeline.id_to_token(i)]} for name, i in given.items()
        ],
    )
