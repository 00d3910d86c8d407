"""The layouts that are known, by hand: a new one is a class and a line here."""

from __future__ import annotations

from alcoda.interop.hf_layout import Alcoda
from alcoda.interop.huginn import Huginn
from alcoda.interop.layout import Layout
from alcoda.interop.llama import Llama
from alcoda.interop.llama2c import Llama2C
from alcoda.interop.ouro import Ouro

LAYOUTS: tuple[Layout, ...] = (Alcoda(), Huginn(), Ouro(), Llama(), Llama2C())
"""In the order in which they are asked whether they recognise a config.json."""
