"""What a model of transformers says, and the same as a script for a Python in which alcoda cannot be imported.

hf_answers.py FOUND AGAIN FOLDER...   loads each folder by the code in it, writes `answers` of all to FOUND (a file of
torch), and saves the last model in AGAIN
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

PROMPTS = ["once upon a time", "b", "def main(x):"]
EXIT = "state:0.8"


@torch.no_grad()
def answers(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Logits at some depths and with an exit, of left-padded rows too; greedy text and beams, likewise."""
    ids = torch.randint(1, 257, (2, 11), generator=torch.Generator().manual_seed(1))
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert not batch["attention_mask"].all()
    new = {**batch, "max_new_tokens": 8, "eos_token_id": -1}
    ours = model.config.alcoda["model"]
    exits = [EXIT] if ours["n_core"] and ours["sharing"]["kind"] == "tied" else []
    return {
        "logits": model(ids).logits,
        "one loop": model(ids, num_loops=1).logits,
        "padded": model(**batch).logits[batch["attention_mask"].bool()],
        "exit": [model(ids, exit=exit).logits for exit in exits],
        "text": model.generate(**new),
        "beams": model.generate(**new, num_beams=2, num_loops=1),
        "text with exit": [model.generate(**new, exit=exit) for exit in exits],
    }


def main(found: str, again: str, folders: list[str]) -> None:
    sys.modules["alcoda"] = None  # type: ignore[assignment]  # `import alcoda` fails from here on
    import transformers

    transformers.logging.set_verbosity_error()
    said, model = {}, None
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        assert type(model.config) is type(model).config_class
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        said[Path(folder).name] = answers(model, tokenizer)
    torch.save(said, found)
    assert model is not None
    model.save_pretrained(again)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
