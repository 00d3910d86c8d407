"""Downstream tasks with depth as an axis: lm-eval's own through an adapter, and the 22 of CORE.

`encode` makes token ids of texts, `score` log-likelihoods of them at every depth, `adapter` is what lm-eval calls,
`tasks` says where its data lie, `core` scores CORE, `evaluate` runs tasks and keeps what is done.
"""
