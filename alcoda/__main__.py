"""``python -m alcoda``."""

from alcoda.cli import main

main()
