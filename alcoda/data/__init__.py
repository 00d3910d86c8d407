"""Text to batches: corpora, tokenizer, a cache of tokens, splits, and resumable batches. No torch.

data = prepare(DataConfig(corpus="text:books"))
for batch, state in data.batches(batch_size=8, seq_len=256, seed=0): ...
"""

from alcoda.data import binary, hops, tables  # noqa: F401  (registers their corpus forms)
from alcoda.data.batches import NOT_SCORED, Batch, Batches, BatchState
from alcoda.data.cache import TokenStore, cache_root, tokenise
from alcoda.data.config import DataConfig, Source, Splits
from alcoda.data.corpora import Corpus, corpus, form
from alcoda.data.prepare import Data, SourceData, open_corpus, prepare
from alcoda.data.splits import Stream, split
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import TokenizerConfig

__all__ = [
    "NOT_SCORED",
    "Batch",
    "BatchState",
    "Batches",
    "Corpus",
    "Data",
    "DataConfig",
    "Source",
    "SourceData",
    "Splits",
    "Stream",
    "TokenStore",
    "Tokenizer",
    "TokenizerConfig",
    "cache_root",
    "corpus",
    "form",
    "open_corpus",
    "prepare",
    "split",
    "tokenise",
]
