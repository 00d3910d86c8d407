"""An OpenAI-compatible server of a model whose depth is a dial, and what measures one."""
