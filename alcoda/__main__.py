"""The command ``alcoda``, and ``python -m alcoda``."""

import signal
import sys


def main() -> None:
    """`alcoda.cli.main`, which takes a while to import: an interrupt in the middle of that is one, too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `alcoda.cli.main` will, for who calls that
    try:
        from alcoda.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
