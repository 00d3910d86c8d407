"""The laws of docs/design, section 7, as checks of any model: `check_laws` runs them, ``alcoda laws`` prints them.

One file a law. A check raises `LawBroken`, which names what was compared and where it is off; tests/laws runs the same
checks over the whole design space, each with a positive control.
"""

from alcoda.laws.law import Law, LawBroken, LawResult
from alcoda.laws.registry import LAWS
from alcoda.laws.run import LawReport, check_laws
from alcoda.laws.shrink import Shrunk, shrink

__all__ = ["LAWS", "Law", "LawBroken", "LawReport", "LawResult", "Shrunk", "check_laws", "shrink"]
