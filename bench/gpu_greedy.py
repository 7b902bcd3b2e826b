"""Greedy ids of the engine on a CUDA device against transformers on the same device, both in bf16, with the logit gap where they differ.

    python bench/gpu_greedy.py MODEL_FOLDER [--tokens 64] [--deterministic] [--out FILE.json]

Two comparisons: the first id at which transformers' own greedy decoding differs from ours, and how many of our ids are transformers' largest
logit when it is given the same ids before them. A gap is by how much transformers prefers its own choice; one step of bf16 is 0.06 to 0.25 at
logits of 8 to 63.
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

PROMPTS = [
    "The capital of France is", "Once upon a time, there was a", "def fibonacci(n):", "The three laws of motion are",
    "Water boils at", "In 1969, the first", "My favourite recipe for bread is", "The difference between a list and a tuple in Python is",
    "To be, or not to be,", "A triangle with sides 3, 4 and 5 is", "The mitochondria is", "Dear Sir or Madam,",
    "The stock market fell because", "Photosynthesis turns", "import numpy as np\n", "The best way to learn a language is",
    "SELECT name FROM", "The moon is smaller than", "She opened the door and", "Yesterday it rained, so",
]  # fmt: skip


def ours(folder: str, prompts: list[list[int]], n: int, deterministic: bool) -> list[list[int]]:
    """Greedy ids of all prompts, run as one batch."""
    engine = build_engine(
        EngineConfig(folder, "hf", "model", dtype="bfloat16", max_model_len=1024, deterministic=deterministic)
    )
    for i, ids in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, seed=0)
        engine.submit(SessionRecord(str(i), ids, params))
    out: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            out[int(event.session_id)].extend(event.token_ids)
    engine.close()
    return out


@torch.inference_mode()
def compare(model, prompt: list[int], ids: list[int]) -> dict:
    """Where transformers' greedy ids leave ours, and its preference after each of our prefixes."""
    device = model.device
    generated = model.generate(
        torch.tensor([prompt], device=device),
        max_new_tokens=len(ids),
        min_new_tokens=len(ids),
        do_sample=False,
    )[0, len(prompt) :].tolist()
    logits = model(torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(ids, device=device)[:, None])[:, 0]
    gaps = (logits.max(1).values - chosen).tolist()
    first = next((i for i, (a, b) in enumerate(zip(ids, generated)) if a != b), None)
    return {
        "first_difference": first,
        "gap_there": None if first is None else gaps[first],
        "not_its_choice": [(i, round(g, 4)) for i, g in enumerate(gaps) if g > 0],
    }


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("folder")
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--deterministic", action="store_true")
    ap.add_argument("--out", default="")
    a = ap.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.folder)
    prompts = [tokenizer(p).input_ids for p in PROMPTS]
    ids = ours(a.folder, prompts, a.tokens, a.deterministic)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(a.folder, dtype=torch.bfloat16).to(device).eval()
    rows = [compare(model, p, o) for p, o in zip(prompts, ids)]
    n_other = sum(len(r["not_its_choice"]) for r in rows)
    summary = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "prompts": len(rows),
        "ids": len(rows) * a.tokens,
        "its_choice": len(rows) * a.tokens - n_other,
        "largest_gap": max((g for r in rows for _, g in r["not_its_choice"]), default=0.0),
        "same_to_the_end": sum(r["first_difference"] is None for r in rows),
        "gaps_at_first_differences": [round(r["gap_there"], 4) for r in rows if r["gap_there"] is not None],
    }
    print(json.dumps(summary, indent=1), flush=True)
    if a.out:
        with open(a.out, "w") as f:
            json.dump(summary | {"rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
