"""Our models in the transformers library (extra ``transformers``): importing this module registers them.

>>> import alcoda.interop.hf
>>> model = AutoModelForCausalLM.from_pretrained(DIR)  # that lm.save_pretrained wrote
>>> model.generate(**inputs, num_loops=16, exit="state:0.01")

`import alcoda` imports it where transformers is loaded already. Where it is not, nothing is hooked into the import
system: code that runs at somebody else's import is hard to see and breaks in ways that are harder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alcoda.errors import UsageError, install
from alcoda.interop.hf_code import AUTO_MAP, write_code
from alcoda.interop.hf_config import MODEL_TYPE
from alcoda.interop.hf_model import AlcodaConfig
from alcoda.interop.hf_model import AlcodaForCausalLM as Portable
from alcoda.interop.text import build_tokenizer, find_tokenizer

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise UsageError(f"transformers 5 is needed ({error}): {install('transformers')}") from None


class AlcodaForCausalLM(Portable):
    """The same where alcoda is installed: what it saves carries the code, and a tier's tokenizer is checked."""

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As of every model there, with the code that reads it where there is no alcoda."""
        has_code = write_code(Path(save_directory), self.model.config)
        self.config.auto_map = dict(AUTO_MAP) if has_code else None
        super().save_pretrained(save_directory, *args, **kwargs)

    def _tokenizer(self, folder: Path) -> str | None:
        vocab_size = self.model.config.vocab_size
        return build_tokenizer(find_tokenizer(folder, vocab_size), vocab_size, folder).sha256


AutoConfig.register(MODEL_TYPE, AlcodaConfig)
AutoModelForCausalLM.register(AlcodaConfig, AlcodaForCausalLM)
