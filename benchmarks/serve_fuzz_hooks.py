"""What serve_fuzz.py's schemathesis changes in the bodies that it makes: else nearly all of them name a model, a tier
or a token that is not there, and are refused before they are looked at any further."""

from __future__ import annotations

import ast
import contextlib
import zlib
from typing import Any

import schemathesis

RARE = ("model", "exit", "loops", "logit_bias", "tools", "functions", "suffix", "response_format")
"""Fields of which nearly every value is refused."""
KEPT = 0.15


_parse = ast.parse


def parse(*arguments: Any, **how: Any) -> Any:
    """Python 3.11 counts the depth of syntax trees once for all threads: where two workers of schemathesis make one at
    one time, one of them breaks off with a SystemError. It is made again."""
    for _ in range(20):
        with contextlib.suppress(SystemError):
            return _parse(*arguments, **how)
    return _parse(*arguments, **how)


ast.parse = parse


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Leave most of them out; which ones, the body itself decides, so that a seed gives the same requests."""
    if not isinstance(body, dict):
        return body
    draw = zlib.crc32(repr(sorted(body, key=repr)).encode() + repr(body).encode()[:4096])
    return {
        name: value
        for i, (name, value) in enumerate(body.items())
        if name not in RARE or zlib.crc32(f"{draw} {i}".encode()) / 2**32 < KEPT
    }
