"""Questions about one document, or one of several that differ from their first page on: prompts that share their first 2,048 tokens (32
pages of 64) and end before the next page does; and a judge of answers that differ.

Texts prove nothing where the KV comes from another engine: its rounding differs, and a close decision may fall the other way. So where two
answers part, the reference in float32 says how close the decision was; measured at most 0.44 between engines (logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from tests.models import SMOLLM2

SHARED = 2048
PAGES = SHARED // 64
# The largest gap of logits that rounding may bridge.
MAX_GAP = 0.5
QUESTIONS = (
    "What was written on the paper label of the bottle?",
    "What colour were the eyes of the rabbit?",
    "What did Alice take from a shelf as she fell?",
    "Who was Dinah?",
    "What was the table made of?",
    "What lay on the table?",
    "How high was the little door?",
    "What did Alice see through the small passage?",
    "What did the White Rabbit take out of its waistcoat-pocket?",
    "What was Alice's sister doing on the bank?",
)


@cache
def messages(owner: str = "", shared: int = SHARED) -> tuple[str, ...]:
    """What the user says, one for each question. Each owner has a document of its own, of a little less than `shared` tokens."""
    chapter = tokenizer().encode(files("mooncake_kv.common.demo").joinpath("text.txt").read_text(encoding="utf-8"))
    text = f"Read this text{f' of {owner}' if owner else ''}.\n\n{tokenizer().decode(chapter[: shared - 8])}"
    return tuple(f"{text}\n\nQuestion: {question} Answer in a few words." for question in QUESTIONS)


@cache
def prompts(owner: str = "", shared: int = SHARED) -> tuple[list[int], ...]:
    """Token ids of the messages, with the chat template of SmolLM2; the first `shared` are those of all of them."""
    found = []
    for message in messages(owner, shared):
        chat: Any = tokenizer().apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False)
        ids = tokenizer().encode(chat)
        assert shared < len(ids) < shared + 64
        found.append(ids)
    assert len({tuple(ids[:shared]) for ids in found}) == 1
    return tuple(found)


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SMOLLM2)


def gap_at_fork(prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> float:
    """How far apart the logits of the two tokens are, at which two answers part, in float32; 0.0 if they do not."""
    fork = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if fork is None:
        return 0.0
    import torch

    with torch.inference_mode():
        logits = _reference()(torch.tensor([[*prompt, *one[:fork]]]), logits_to_keep=1).logits[0, -1]
    return float(abs(logits[one[fork]] - logits[other[fork]]))


@cache
def _reference() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
