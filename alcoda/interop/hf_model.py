"""Our models as classes of the transformers library (extra ``transformers``); `alcoda.interop.hf` registers them.

`alcoda.interop.hf_code` copies this module into the folders of exported models with all that it needs, so it imports
nothing but `alcoda.model`, `alcoda.depth` and what stands below those.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alcoda.depth.exiting import Exits, pick_coda_keys
from alcoda.depth.sequential import ExitReader
from alcoda.depth.tiers import EXITS, PROBE, find_exit
from alcoda.depth.watch import ExitTest
from alcoda.errors import RunError, UsageError, some
from alcoda.interop.hf_cache import AlcodaCache
from alcoda.interop.hf_config import MODEL_TYPE, OURS, check_exports, read_model, tool_fields
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in
from alcoda.model.prefill import Reader

try:
    from transformers import (
        GenerationMixin,
        PretrainedConfig,
        PreTrainedModel,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import cached_file
except ImportError as error:
    raise UsageError(f"transformers 5 is needed ({error}): pip install 'alcoda[transformers]'") from None

CACHE = (
    "cache" if "cache" in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
)
"""What this version of transformers calls the cache."""
IGNORED = -100
"""A label of no token, as everywhere in transformers."""


class AlcodaConfig(PretrainedConfig):
    """A `ModelConfig` in transformers' words: ``alcoda`` has all of it, ``num_loops`` the depth where none is named."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        alcoda: dict[str, Any] | None = None,
        num_loops: int | None = None,
        use_cache: bool = True,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> None:
        alcoda = {"model": ModelConfig().model_dump(mode="json")} if alcoda is None else alcoda
        model = read_model({OURS: alcoda, **kwargs})
        super().__init__(return_dict=return_dict, **{**tool_fields(model), **kwargs})
        self.alcoda, self.use_cache = alcoda, use_cache
        self.num_loops = model.n_loops if num_loops is None else num_loops

    def model_config(self) -> ModelConfig:
        """The same as ours; UsageError where it contradicts itself."""
        return read_model({OURS: self.alcoda, **{k: v for k, v in vars(self).items() if k != OURS}})


class AlcodaForCausalLM(PreTrainedModel, GenerationMixin):
    """A `RecurrentLM` that transformers loads, trains and generates with."""

    config_class = AlcodaConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"

    def __init__(self, config: AlcodaConfig, **_: Any) -> None:
        super().__init__(config)
        ours = config.model_config()
        check_exports(ours)
        self.model = RecurrentLM(ours)
        if not self.model.embed.weight.is_meta:  # else from_pretrained fills it
            self.model.float().init(int(torch.randint(1 << 31, ())))
        self._tests: dict[Any, ExitTest] = {}
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """Nothing: `RecurrentLM.init` has done it, and a folder that lacks weights is refused."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate begins without one, and goes on with that of the first `forward`

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As of every model there.

        ``dtype`` bfloat16 holds the linear maps in bf16 and multiplies in it, everything else stays in float32, as
        with `alcoda.load`; auto is that of config.json.

        Raises:
            UsageError: another dtype.
            RunError: weights that are not those of the config.
        """
        asked = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        wants_info = kwargs.pop("output_loading_info", False)
        config = kwargs.get("config")
        if asked in (None, "auto"):
            config = AlcodaConfig.from_pretrained(pretrained_model_name_or_path) if config is None else config
            asked = getattr(config, "dtype", None) or torch.float32
        dtype = getattr(torch, asked, None) if isinstance(asked, str) else asked
        if dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(f"dtype {asked!r}. Allowed: torch.float32, torch.bfloat16, 'auto'")
        found, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, dtype=torch.float32, output_loading_info=True, **kwargs
        )
        wrong = {key: sorted(map(str, info.get(key) or ())) for key in ("missing_keys", "unexpected_keys")}
        wrong["mismatched_keys"] = [str(one[0]) for one in info.get("mismatched_keys") or ()]
        if any(wrong.values()):
            said = "; ".join(f"{key.replace('_', ' ')}: {some(names)}" for key, names in wrong.items() if names)
            raise RunError(f"the weights in {pretrained_model_name_or_path} do not fit its config.json: {said}")
        if dtype == torch.bfloat16:
            hold_in(found.model, dtype)
            found.config.dtype = dtype
        return (found, info) if wants_info else found

    def get_input_embeddings(self) -> Any:
        return self.model.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embed = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AlcodaCache | None = None,
        cache: AlcodaCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | None = None,
        exit: str | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits of the next token after each of ``input_ids``.

        Args:
            attention_mask: [B, S], 0 for padding, of the tokens in the cache too.
            position_ids: [B, T] or [1, T]; by the attention mask where None.
            past_key_values, cache: of the tokens before; the two names are those of older and newer versions.
            labels: [B, T], the tokens themselves; -100 where there is no loss.
            use_cache: whether a cache comes back; then no gradients do. Where None, as config.json says while gradients
                are off, and none in training.
            num_loops: loops of the core (with ``exit``, at most); ``config.num_loops`` where None.
            exit: when a token leaves the loop early: a rule (``"state:0.01"``), or a tier of the folder
                (``"balanced"``); no gradients come back. docs/exits.md.
            kwargs: what transformers hands on; ``output_hidden_states`` and ``output_attentions`` are refused.

        Raises:
            UsageError: an argument that cannot be.
        """
        self._check(input_ids, kwargs)
        assert input_ids is not None
        held = cache if past_key_values is None else past_key_values
        if held is not None and not isinstance(held, AlcodaCache):
            raise UsageError(
                f"a cache of kind {type(held).__name__}: a looped model keeps keys of every loop, which this kind "
                "cannot hold. Leave it out: the first call makes one"
            )
        decodes = self.model.config.route.causal_at_eval
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and decodes and not self.training and not torch.is_grad_enabled()
        use_cache = use_cache or held is not None
        if use_cache or exit is not None:
            self.model.config.check_decodes()
        test = None if exit is None else self._test(exit, num_loops)
        n_loops = self._loops(num_loops) if test is None else test.n_loops
        start = 0 if held is None else held.get_seq_length()
        pos_BT, live_BT = _places(input_ids, attention_mask, position_ids, start)
        with self._computing():
            if use_cache or test is not None:
                if held is None:
                    held = AlcodaCache(self._reader(n_loops, test), (n_loops, exit))
                held.check((n_loops, exit))
                with torch.no_grad():
                    y_BTD = held.reader.read(input_ids, None, pos_BT, live_BT)
            else:
                y_BTD = next(self.model.readouts(input_ids, [n_loops], pos_BT=pos_BT, live_BT=live_BT)).y_BTD
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            # The engine's and `LM.logits`' precision too: fp32 or finer.
            logits_BTV = self.model.logits(y_BTD if labels is not None else y_BTD[:, keep])
            logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        loss = None if labels is None else _loss(logits_BTV, labels)
        out = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, **({CACHE: held} if use_cache else {}))
        as_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        return out.to_tuple() if as_tuple else out

    def _check(self, input_ids: Tensor | None, kwargs: dict[str, Any]) -> None:
        if input_ids is None:
            raise UsageError("input_ids are needed: this model does not take inputs_embeds")
        wanted = [name for name in ("output_hidden_states", "output_attentions", "inputs_embeds") if kwargs.get(name)]
        if wanted:
            raise UsageError(f"{', '.join(wanted)}: this model does not give that. alcoda's lm.trace looks inside")
        if self.model.embed.weight.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"the whole model was cast to {self.model.embed.weight.dtype}, and norms and gates need float32: load "
                "it with from_pretrained(..., dtype=torch.bfloat16), which keeps them"
            )

    def _loops(self, num_loops: int | None) -> int:
        config = self.model.config
        return config.check_loops(self.config.num_loops if num_loops is None else num_loops, "num_loops")

    def _computing(self) -> AbstractContextManager[Any]:
        """Autocast to bf16 where the linear maps are held in it."""
        held = {weight.dtype for weight in self.model.parameters()}
        device = self.model.embed.weight.device.type
        return torch.autocast(device, dtype=torch.bfloat16) if torch.bfloat16 in held else nullcontext()

    def _reader(self, n_loops: int, test: ExitTest | None) -> Reader:
        if test is None:
            return Reader(self.model, n_loops)
        return ExitReader(self.model, Exits(test, pick_coda_keys(test, None)))

    def _test(self, exit: str, num_loops: int | None) -> ExitTest:
        """The rule at work; a tier is that of the folder which the model was loaded from."""
        if not isinstance(exit, str):
            raise UsageError(f"exit={exit!r}: the name of a rule or a tier, such as 'state:0.01' or 'balanced'")
        key = (exit, num_loops)
        if key not in self._tests:
            folder = self._folder()
            self._tests[key] = find_exit(exit, self.model, folder, self._tokenizer(folder), num_loops).test
        return self._tests[key]

    def _folder(self) -> Path:
        """Where the tiers lie: the folder of the model; of one of the hub, its place in the cache."""
        name = self.config.name_or_path or "."
        if not Path(name).is_dir():
            found = [cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in (PROBE, EXITS)]
            name = next((str(Path(file).parent) for file in found if file is not None), name)
        return Path(name)

    def _tokenizer(self, folder: Path) -> str | None:
        """SHA-256 of the tokenizer in ``folder``, for tiers that were calibrated with one; None: it is not known."""
        return None


def _places(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, start: int
) -> tuple[Tensor | None, Tensor | None]:
    """Positions and liveness of the tokens behind ``start`` others; None where they are those of rows without padding.

    A padding token has position 0, and sees the first token of the text (`KeyStore`): no row of it is empty.
    """
    (n_rows, n_tokens), device = input_ids.shape, input_ids.device
    live_BT = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape not in ((n_rows, n_tokens), (n_rows, start + n_tokens)):
            raise UsageError(
                f"attention_mask of shape {tuple(attention_mask.shape)}: [{n_rows}, {start + n_tokens}] is needed, the "
                f"{start} tokens in the cache and {n_tokens} new ones; 0 for padding, 1 for text"
            )
        mask_BS = attention_mask.to(device).bool()
        if not mask_BS.all():
            if start and mask_BS.size(1) == n_tokens:
                raise UsageError("attention_mask with padding must cover the tokens in the cache too")
            live_BT = mask_BS[:, -n_tokens:]
            if position_ids is None:
                position_ids = (mask_BS.long().cumsum(1) - 1).clamp_min(0)[:, -n_tokens:]
    plain_T = torch.arange(start, start + n_tokens, device=device)
    if position_ids is None:
        return None, None
    if position_ids.dim() != 2 or position_ids.size(1) != n_tokens or position_ids.size(0) not in (1, n_rows):
        raise UsageError(f"position_ids of shape {tuple(position_ids.shape)}: [{n_rows}, {n_tokens}] is needed")
    position_ids = position_ids.to(device)
    if live_BT is None and bool((position_ids == plain_T).all()):
        return None, None
    return position_ids.expand(n_rows, n_tokens), live_BT


def _loss(logits_BTV: Tensor, labels: Tensor) -> Tensor:
    """The mean loss in nats of the next tokens that have a label."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].to(logits_BTV.device)
    return F.cross_entropy(logits_BTV.flatten(0, 1), shifted.flatten(), ignore_index=IGNORED)
